"""The attention of all encoder-decoder families and of drafters."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError
from ..attention_parts import attend_by_kernel
from ..rows import KVCache

KeysValues = Sequence[mx.array]
"""Keys and values, (batch, heads, n, head_dim) each."""
Mask = mx.array | str | None
Offset = int | mx.array | None
"""Position of the first row, for all sequences or (batch,); None for rows without positions."""
SOURCE_ROWS = 512
"""Maximum number of rows of a source that attend at once. The memory of the attention scores then
grows linearly with the length of the source, and not quadratically."""
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    # nn.relu is compiled, which is slower on the CPU.
    "relu": lambda states: mx.maximum(states, 0),
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
    "swish": nn.silu,
}


def check_activation(key: str, name: object) -> None:
    """Raise CheckpointError if there is no activation of this name, which `key` states."""
    if name not in ACTIVATIONS:
        raise CheckpointError(f"config.json has {key} {name!a:.40}, which is not supported")


class Attention(nn.Module):
    """Attention with `heads` query heads that share `shared` heads of keys and values. Modules
    `q_norm` and `k_norm` norm queries and keys, if somebody adds them.

    Args:
        width: Width of the output.
        scale: Factor of the scores.
        names: Names of the projections to queries, keys, values and the output.
        inputs: Width of the states from which queries are computed; None for `width`.
        attended: Width of the states from which keys and values are computed; None for `inputs`.
        rope: Rotates queries and keys, (batch, heads, m, head_dim), except those without positions.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        shared: int,
        head_dim: int,
        *,
        scale: float,
        bias: bool = False,
        names: Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj"),
        inputs: int | None = None,
        attended: int | None = None,
        rope: Callable[..., mx.array] | None = None,
    ) -> None:
        super().__init__()
        self._head_dim, self._scale, self._names, self._rope = head_dim, scale, names, rope
        queries, keys, values, output = names
        inputs = inputs or width
        self[queries] = nn.Linear(inputs, heads * head_dim, bias=bias)
        for name in (keys, values):
            self[name] = nn.Linear(attended or inputs, shared * head_dim, bias=bias)
        self[output] = nn.Linear(heads * head_dim, width, bias=bias)

    def queries(self, states: mx.array, offset: Offset = 0) -> mx.array:
        """Return the queries, (batch, heads, n, head_dim), of states, (batch, n, width)."""
        return self._placed("q_norm", self._heads(self[self._names[0]](states)), offset)

    def keys_values(self, states: mx.array, offset: Offset = 0) -> tuple[mx.array, mx.array]:
        """Return keys and values, (batch, shared, n, head_dim) each."""
        _, keys, values, _ = self._names
        placed = self._placed("k_norm", self._heads(self[keys](states)), offset)
        return placed, self._heads(self[values](states))

    def _placed(self, norm: str, heads: mx.array, offset: Offset) -> mx.array:
        heads = self[norm](heads) if norm in self else heads
        return heads if self._rope is None or offset is None else self._rope(heads, offset=offset)

    def __call__(
        self, states: mx.array, attended: KeysValues, mask: Mask, offset: Offset = None
    ) -> mx.array:
        """Attend from states, (batch, m, width), to keys and values. The first state is at
        position `offset`. The mask is False for keys to hide, or has floats that are added to the
        scores."""
        keys, values = attended
        return self.attend(self.queries(states, offset), keys, values, mask)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
        """Return the output, (batch, m, width), for queries, keys and values."""
        mixed = attend_by_kernel(self._mixed, queries, keys, values, mask)
        batch, _, rows, _ = mixed.shape
        if rows > 1:
            mixed = mixed.transpose(0, 2, 1, 3)
        return self[self._names[3]](mixed.reshape(batch, rows, -1))

    def _mixed(self, queries: mx.array, keys: mx.array, values: mx.array, mask: Mask) -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=self._scale, mask=mask
        )

    def _heads(self, flat: mx.array) -> mx.array:
        batch, rows, _ = flat.shape
        if rows == 1:
            # A single row needs no transposition, and plain decoding has only single rows.
            return flat.reshape(batch, -1, 1, self._head_dim)
        return flat.reshape(batch, rows, -1, self._head_dim).transpose(0, 2, 1, 3)


Attend = Callable[[Attention, mx.array], mx.array]
"""Computes a layer's self-attention from the attention module and normed states, (batch, m, width).
A decoder's layer also gets `source`, the keys and values of the encoder's output, and `hidden`,
their mask."""


def attend_cached(
    cache: KVCache, mask: Mask, attention: Attention, states: mx.array, offset: Offset = None
) -> mx.array:
    """Add new rows of a sequence to its cache, and attend from them to all rows of the cache."""
    return attention(states, cache.append(*attention.keys_values(states, offset)), mask, offset)


def attend_in_parts(
    visible: Callable[[int, int], tuple[slice, Mask]], attention: Attention, states: mx.array
) -> mx.array:
    """Attend within a source, SOURCE_ROWS rows at a time. `visible(first, last)` returns the
    positions that the rows first to last - 1 attend to, and the mask of these positions."""
    length, mixed = states.shape[1], []
    pair = attention.keys_values(states, 0)
    for first in range(0, length, SOURCE_ROWS):
        rows = states[:, first : first + SOURCE_ROWS]
        positions, mask = visible(first, first + rows.shape[1])
        part = [array[:, :, positions] for array in pair]
        mixed.append(attention(rows, part, mask, first))
        if length > SOURCE_ROWS:
            # Compute the parts one after the other. Otherwise the scores of all parts would be in
            # memory at once, and an interrupt would have to wait for all parts.
            mx.eval(mixed[-1])
    return mx.concatenate(mixed, axis=1)
