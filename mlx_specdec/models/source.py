"""What a T5 has computed of the sources of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from .kv_cache import padded
from .t5_layers import KeysValues


@dataclass(frozen=True)
class Source:
    """What was computed of the sources of a batch.

    encoded: the encoder's output for each sequence, (1, n, d_model) without padding. It is kept for
    drafters, and is small beside the rest. projected: per decoder layer the cross-attention's keys
    and values of it.
    """

    encoded: tuple[mx.array, ...]
    projected: Sequence[KeysValues]

    @classmethod
    def of(cls, arrays: Sequence[mx.array]) -> Source:
        """Of one sequence; see `arrays`."""
        encoded, *parts = arrays
        return cls((encoded,), list(zip(parts[::2], parts[1::2], strict=True)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each source."""
        return tuple(each.shape[1] for each in self.encoded)

    @cached_property
    def mask(self) -> mx.array | None:
        """See `padding_mask`."""
        return padding_mask(self.lengths)

    def arrays(self, row: int) -> tuple[mx.array, ...]:
        """All that there is of one sequence."""
        own, length = slice(row, row + 1), self.lengths[row]
        parts = (each[own, :, :length] for pair in self.projected for each in pair)
        return (self.encoded[row], *parts)

    def join(self, other: Source) -> Source:
        """These sequences, and those of another one behind them."""
        longest = max(self.lengths + other.lengths)
        projected = [
            (_both(own[0], its[0], longest), _both(own[1], its[1], longest))
            for own, its in zip(self.projected, other.projected, strict=True)
        ]
        return Source(self.encoded + other.encoded, projected)

    def filter(self, keep: Sequence[int]) -> Source:
        """These sequences alone, in this order."""
        encoded = tuple(self.encoded[row] for row in keep)
        index, longest = mx.array(list(keep), dtype=mx.int32), max(e.shape[1] for e in encoded)
        projected = [
            (keys[index, :, :longest], values[index, :, :longest])
            for keys, values in self.projected
        ]
        return Source(encoded, projected)


def padding_mask(lengths: Sequence[int]) -> mx.array | None:
    """(batch, longest) bool, False for padding; None where there is none."""
    if min(lengths) == max(lengths):
        return None
    return mx.arange(max(lengths)) < mx.array(list(lengths))[:, None]


def _both(own: mx.array, its: mx.array, columns: int) -> mx.array:
    return mx.concatenate([padded(own, columns), padded(its, columns)])
