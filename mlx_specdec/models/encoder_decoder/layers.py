"""What the layers of all encoder-decoder families have in common."""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from ..attention_parts import attend_by_kernel
from ..kv_cache import KVCache

KeysValues = Sequence[mx.array]
"""Two, (batch, heads, n, head_dim) each."""
Mask = mx.array | str | None
Offset = int | mx.array | None
"""Position of the first row, for all sequences or (batch,); None for rows without positions."""
SOURCE_ROWS = 512
"""Of a source, that attend in one pass: what a longer one takes then grows with its length alone,
not with its square."""
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    # nn.relu is compiled, which costs the CPU more than it saves.
    "relu": lambda states: mx.maximum(states, 0),
    "gelu": nn.gelu,
    "gelu_new": nn.gelu_approx,
    "silu": nn.silu,
    "swish": nn.silu,
}


class Attention(nn.Module):
    """Attention over `heads`, and keys and values of `shared` heads. names: of the projections to
    queries, keys, values and the output."""

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
    ) -> None:
        super().__init__()
        self._head_dim, self._scale, self._names = head_dim, scale, names
        for name, count in zip(names[:3], (heads, shared, shared), strict=True):
            self[name] = nn.Linear(width, count * head_dim, bias=bias)
        self[names[3]] = nn.Linear(heads * head_dim, width, bias=bias)

    def queries(self, states: mx.array, offset: Offset) -> mx.array:
        """(batch, n, width) -> (batch, heads, n, head_dim)."""
        return self._heads(self[self._names[0]](states))

    def keys_values(self, states: mx.array, offset: Offset = None) -> tuple[mx.array, mx.array]:
        _, keys, values, _ = self._names
        return self._heads(self[keys](states)), self._heads(self[values](states))

    def __call__(
        self, states: mx.array, given: KeysValues, mask: Mask, offset: Offset = None
    ) -> mx.array:
        """Attend from (batch, m, width) to given keys and values. mask: bool, False hides a key, or
        what is added to the scores."""
        queries, (keys, values) = self.queries(states, offset), given
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
            # One row lies the same either way, and plain decoding is nothing but single rows.
            return flat.reshape(batch, -1, 1, self._head_dim)
        return flat.reshape(batch, rows, -1, self._head_dim).transpose(0, 2, 1, 3)


Attend = Callable[[Attention, mx.array], mx.array]
"""What a layer's self-attention makes of normed states, (batch, m, width)."""


def attend_cached(
    cache: KVCache, mask: Mask, attention: Attention, states: mx.array, offset: Offset = None
) -> mx.array:
    """Attend from new rows of a text to themselves and to those in the cache."""
    return attention(states, cache.append(*attention.keys_values(states, offset)), mask, offset)


def attend_in_parts(
    seen: Callable[[int, int], tuple[slice, Mask]], attention: Attention, states: mx.array
) -> mx.array:
    """Attend within a source, SOURCE_ROWS rows at a time. seen: the columns that rows first to last
    - 1 see, and their mask."""
    length, mixed = states.shape[1], []
    given = attention.keys_values(states, 0)
    for first in range(0, length, SOURCE_ROWS):
        rows = states[:, first : first + SOURCE_ROWS]
        columns, mask = seen(first, first + rows.shape[1])
        part = [each[:, :, columns] for each in given]
        mixed.append(attention(rows, part, mask, first))
        if length > SOURCE_ROWS:
            # One after the other, or the scores of all would be in memory together, and an
            # interrupt would wait for all of them.
            mx.eval(mixed[-1])
    return mx.concatenate(mixed, axis=1)


class WholeTexts:
    """A layer's cache in training, where a pass reads whole texts. before: the keys and values of
    their sources, where one softmax is over both."""

    def __init__(self, before: KeysValues = ()) -> None:
        self._before = before

    def append(self, *new: mx.array) -> KeysValues:
        pairs = zip(self._before, new, strict=True)
        return [mx.concatenate([*pair], axis=2) for pair in pairs] if self._before else new
