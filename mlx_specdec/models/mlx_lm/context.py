"""Contexts of mlx-lm's models: batches for models with plain attention, and single sequences for
models with other caches. mlx-lm's attention takes positions and masks from its cache, so one cache
class serves all families with plain attention."""

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_caches
from mlx_lm.models.cache import create_attention_mask

from ...interfaces import Context, Scores
from ...interfaces.results import Reusable, Snapshot
from ..base import check_pass, check_rewind
from ..cpu_layers import FEW_ROWS
from ..kv_cache import KVCache, QuantizedBuffer
from ..number_format import on_cpu
from ..rows import Place, Rows, RowsContext
from .network import TappedNetwork
from .rewinding import RewindableCache, slots


class BatchedCache(KVCache):
    """A KV cache of several sequences, with the attributes that mlx-lm's models read."""

    _written: Place | None = None

    @property
    def offset(self) -> int | mx.array:
        """The position of the next token: one number if it is the same for all sequences, otherwise
        (batch,) int32."""
        place = self._rows.place
        written = place.rows if self._written is place else 0
        if place.even:
            return place.starts[0] + written
        return place.offsets + written if written else place.offsets

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.state)

    @property
    def keys(self) -> mx.array | None:
        """The buffer of the keys. A model in a pipeline replaces it by one that depends on the
        transfer of the hidden states."""
        return self.buffers[0].array

    @keys.setter
    def keys(self, array: mx.array) -> None:
        self.buffers[0].array = array

    @property
    def values(self) -> mx.array | None:
        """The buffer of the values, from which `latent` computes a part of Mistral 4's scores."""
        return self._values.parts[0].array

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        self._written = self._rows.place
        return self.append(keys, values)

    def make_mask(
        self, rows: int, return_array: bool = False, window_size: int | None = None
    ) -> Any:
        place = self._rows.place
        if not place.even:
            mask = place.visible(window_size)
            return mask if self._rows.mask_axes() == 4 else mask[:, None]
        # On a CPU every layer would turn "causal" into an array again: make the array once.
        as_array = return_array or (rows <= FEW_ROWS and on_cpu())
        return create_attention_mask(
            rows, offset=place.starts[0], return_array=as_array, window_size=window_size
        )


class BatchedQuantizedCache(BatchedCache):
    """A BatchedCache with quantized keys and values. Models read `bits` and `group_size`."""

    def __init__(self, rows: Rows, group_size: int, bits: int) -> None:
        super().__init__(rows, lambda: QuantizedBuffer(group_size, bits))
        self.group_size = group_size
        self.bits = bits


MakeCache = Callable[[Rows], BatchedCache]


def batched(cache: Any) -> MakeCache | None:
    """Return a function that makes the batched equivalent of one of mlx-lm's caches, or None if
    there is no equivalent."""
    if type(cache) is mlx_lm_caches.KVCache:
        return BatchedCache
    if type(cache) is mlx_lm_caches.QuantizedKVCache:
        group_size, bits = cache.group_size, cache.bits
        return lambda rows: BatchedQuantizedCache(rows, group_size, bits)
    return None


class DecoderOnlyContext(RowsContext):
    """An interfaces.Context of `count` sequences in a model with plain attention.

    Args:
        make: For each layer, the function that makes the layer's cache.
        count: Number of sequences.
        mask_axes: Returns the number of axes of masks; see `rows.Rows`."""

    def __init__(
        self,
        model: TappedNetwork,
        make: Sequence[MakeCache],
        count: int,
        mask_axes: Callable[[], int | None] = lambda: 4,
    ) -> None:
        rows = Rows(count, mask_axes)
        super().__init__(rows, [make_cache(rows) for make_cache in make])
        self._model = model

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        for name in taps:
            self._model.tap(name)  # raises OptionError before the caches change
        self._rows.advance(tokens, proposed)
        return self._model.run(tokens, self._caches, taps)

    def evaluate(self) -> None:
        mx.eval([cache.state for cache in self._caches])
        mx.clear_cache()


class ReplayingContext:
    """An interfaces.Context of one sequence in a model whose caches are windows or recurrent state.

    Args:
        entries: Caches of `length` tokens. The context owns them from now on.
        length: Number of tokens in the caches."""

    checkpoints = True

    def __init__(self, model: TappedNetwork, entries: Any, length: int = 0) -> None:
        self._model = model
        self._cache = RewindableCache(entries, length)
        self._final = length
        # Tokens from position `_since` on, which a replay may need.
        self._undecided: list[mx.array] = []
        self._since = length

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._cache.length,)

    @property
    def replays(self) -> bool:
        return self._cache.replays

    def advance(self, tokens: mx.array, proposed: int = 0, taps: Sequence[str] = ()) -> Scores:
        rows = check_pass(tokens, proposed, 1)
        for name in taps:
            self._model.tap(name)  # raises OptionError before the caches change
        start = self._cache.length
        self._cache.before_pass(rows, proposed)
        scores = self._model.run(tokens, self._cache.entries, taps)
        if proposed < rows:
            self._final = start + rows - proposed
            self._undecided, self._since = [], start
        elif not self._undecided:
            self._since = start
        if proposed and self._cache.replays:
            self._undecided.append(tokens)
        return scores

    def rewind(self, lengths: tuple[int, ...]) -> int:
        """Rewind as interfaces.Context says. If the caches can only go further back, submit another
        pass over the accepted tokens without waiting for it."""
        check_rewind(lengths, (self._final,), self.lengths)
        [length] = lengths
        reached = self._cache.rewind(length)
        if reached < length:
            tokens = mx.concatenate(self._undecided, axis=1)
            accepted = tokens[:, reached - self._since : length - self._since]
            self._cache.before_pass(length - reached, 0)
            self._model.run(accepted, self._cache.entries)
            # The device computes the caches while the host builds the next proposal. The logits are
            # not needed.
            mx.async_eval(self._cache.state)
        self._final, self._undecided, self._since = length, [], length
        return int(reached < length)

    def evaluate(self) -> None:
        mx.eval(self._cache.state)
        mx.clear_cache()

    def join(self, other: Context) -> None:
        raise TypeError("a context of one sequence")

    def filter(self, keep: Sequence[int]) -> None:
        """Do nothing: the context holds one sequence."""

    def reusable(self, sequence: int) -> Reusable:
        length = self._cache.length
        if not length or length != self._final:
            return Reusable()
        return Reusable(snapshot=Snapshot(length, *_snapshot(self._cache.entries)))


def _snapshot(entries: list[Any]) -> tuple[str, tuple[mx.array, ...]]:
    """Return the states of mlx-lm's caches as JSON, and their arrays, to which the JSON refers by
    number. Views are copied lazily, so that a snapshot does not keep larger arrays in memory."""
    arrays: list[mx.array] = []

    def encode(part: Any) -> Any:
        if isinstance(part, mx.array):
            arrays.append(mx.contiguous(part))
            return {"array": len(arrays) - 1}
        if isinstance(part, tuple):
            return {"tuple": [encode(item) for item in part]}
        return [encode(item) for item in part] if isinstance(part, list) else part

    states = [encode(slot.cache.state) for slot in slots(entries)]
    return json.dumps(states), tuple(arrays)


def restored(entries: list[Any], snapshot: Snapshot) -> list[Any]:
    """Put the states of a snapshot into empty caches and return the caches. The snapshot's arrays
    are copied. Raises ValueError if the snapshot has another number of caches."""

    def decode(part: Any) -> Any:
        if isinstance(part, dict):
            if "array" in part:
                # Caches write into their arrays.
                return copy.deepcopy(snapshot.arrays[part["array"]])
            return tuple(map(decode, part["tuple"]))
        return [decode(item) for item in part] if isinstance(part, list) else part

    for slot, state in zip(slots(entries), json.loads(snapshot.value or ""), strict=True):
        slot.cache.state = decode(state)
    return entries
