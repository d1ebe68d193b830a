"""Between a target's token ids and those of a draft with another vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx


class Translation:
    """shared: per target id the draft's id for the same text, -1 where it has none.
    fed: per target id what the draft is given in its place, always an id that it has.
    """

    def __init__(self, shared: Sequence[int], fed: Sequence[int]) -> None:
        self._fed = tuple(fed)
        self._fed_ids = mx.array(self._fed, dtype=mx.int32)
        self._columns = mx.array([max(0, id) for id in shared], dtype=mx.int32)
        self._missing = mx.array([id < 0 for id in shared])
        mx.eval(self._fed_ids, self._columns, self._missing)

    def feed(self, tokens: Sequence[int]) -> list[int]:
        """The draft's ids for a text of the target's, one for one. A token that the target's
        tokenizer does not have costs acceptance, never exactness."""
        return [self._fed[token] if 0 <= token < len(self._fed) else 0 for token in tokens]

    def feed_array(self, tokens: mx.array) -> mx.array:
        """The same on the device, (...) int32."""
        return self._fed_ids[tokens]

    def rows(self, logits: mx.array) -> mx.array:
        """The draft's logits (..., draft's vocabulary) over the target's ids: -inf where the draft
        has no such token, so that what is drawn is always one that both have."""
        rows = mx.take(logits, self._columns, axis=-1)
        return mx.where(self._missing, mx.array(-mx.inf, dtype=rows.dtype), rows)
