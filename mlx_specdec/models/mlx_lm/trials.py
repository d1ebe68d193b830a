"""Trials that show whether a model of mlx-lm supports speculation, batches and absorption.

Speculation requires that a pass over several rows computes the same as passes over single rows.
Batches require that each sequence can have its own position. Some models fail, because of a mask of
the wrong type, or a window that is one token wider for all rows but the first. A list of such
models would soon be outdated. Differences from rounding are allowed."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ...errors import OptionError, first_line
from ...interfaces import after, rectangle
from ..number_format import on_cpu
from ..sharding import of_rank_0
from . import latent
from .attention import replace_in
from .context import DecoderOnlyContext, MakeCache
from .network import TappedNetwork, type_name
from .rewinding import slots

BEGUN = 5
"""Number of tokens in the cache before the compared rows. No row is then the first of its
sequence."""
ROWS = 4
"""Number of rows that are compared."""
LAYERS = 4
"""The least number of layers to compute. More are computed if a later layer is of a new kind."""
ATTEMPTS = 3
"""Number of attempts, each with other tokens. In half precision, rounding can send a token to
another expert, so that a single attempt proves no fault."""
WIDEST = 1 << 16
"""The largest window, in tokens, that a trial fills. Only users set wider windows, with
--max-kv-size, and such a window is the same for all rows."""
OUTWEIGHS = 4
"""Ratio of each value to the value that leaves the window after it."""
TRIED = ((3, 1), (7, 4), (6, 2), (7, 2), (9, 3))
"""For each sequence of a trial batch: its number of tokens, and how many of them are rewound and
fed again. All sequences are rewound to different lengths, so that a model that uses one position
for all sequences fails."""
MASK_AXES = (4, 5)
"""Numbers of mask axes to try, in this order: (batch, heads, rows, keys), then one more axis for
query heads that share keys."""
LIMIT, TF32_LIMIT, HALF_LIMIT = 0.001, 0.01, 0.1
"""The largest difference of two rows, relative to their norm, that counts as rounding: in float32
on the CPU, in float32 elsewhere, and in half precision. An accelerator may multiply float32 in
TF32, which changes rows by up to 0.005. A wrong mask changes them by 0.1 to 1."""
ROUNDINGS = 8
"""A relative difference of this many machine epsilons of the dtype always counts as equal."""
NOISE = 2
"""Absorbed rows may differ from single rows by this factor more than expanded rows do: differences
from rounding vary."""


@dataclass(frozen=True)
class BatchTrial:
    """The outcome of trial batches, whose sequences have different lengths.

    Attributes:
        mask_axes: Number of axes that masks need, or None if the model cannot decode batches.
        reason: Why the model cannot decode batches, in one line; "" if it can."""

    mask_axes: int | None
    reason: str = ""


def misfit(model: TappedNetwork, make: Sequence[MakeCache]) -> str:
    """Return why a model cannot be called with batched caches, in one line; "" if it can. Nothing
    is computed."""
    try:
        with model.lazily():
            DecoderOnlyContext(model, make, 1).advance(mx.zeros((1, 2), dtype=mx.int32))
    except Exception as problem:
        # Some models read attributes that only mlx-lm's caches have.
        return f"it fails with caches of several sequences ({first_line(problem)})"
    return ""


def try_batches(model: TappedNetwork, make: Sequence[MakeCache]) -> BatchTrial:
    """Compare the logits of sequences in a batch with the logits of single sequences.

    Several attempts are made with each number of mask axes, and one success is enough. If all fail,
    the reason names the smallest difference. Rank 0 decides for all ranks that share the model.
    make: For each layer, the function that makes its batched cache."""
    reasons: dict[float, str] = {}
    for seed, axes in itertools.product(range(ATTEMPTS), MASK_AXES):
        try:
            apart, limit = _batch_apart(model, make, axes, seed)
            reason = (
                f"in a trial its logits were off by {apart:.2g} of their norm; {limit:g} is allowed"
            )
        except Exception as problem:
            # Some models need one offset for all sequences, and fail.
            apart, limit = math.inf, 0.0
            reason = f"a trial pass failed ({first_line(problem)})"
        if of_rank_0(model.group, not apart > limit):
            return BatchTrial(axes)
        reasons.setdefault(apart, reason)
    return BatchTrial(None, reasons[min(reasons)])


def _batch_apart(
    model: TappedNetwork, make: Sequence[MakeCache], axes: int, seed: int
) -> tuple[float, float]:
    """Decode a batch, some of whose tokens are rewound, and the same sequences alone.

    Returns:
        The second-largest relative difference of a sequence's logits, and the limit for it. The
        largest one is ignored, because rounding may send a token to another expert."""
    keys = mx.random.split(mx.random.key(seed), len(TRIED))
    tokens: list[list[int]] = [
        mx.random.randint(0, model.vocabulary, (count,), mx.int32, key=key).tolist()  # type: ignore[misc]
        for key, (count, _) in zip(keys, TRIED, strict=True)
    ]
    batch = DecoderOnlyContext(model, make, len(TRIED), lambda: axes)
    fed_again = [row[-more:] for row, (_, more) in zip(tokens, TRIED, strict=True)]
    batch.advance(rectangle(tokens), proposed=max(map(len, tokens)))
    batch.rewind(tuple(count - more for count, more in TRIED))
    logits = batch.advance(rectangle(fed_again)).logits
    together = mx.stack([logits[row, more - 1] for row, (_, more) in enumerate(TRIED)])
    alone = [model.run(mx.array([sequence]), None).logits[0, -1] for sequence in tokens]
    apart = _apart(together, mx.stack(alone))
    counted: Any = mx.sort(mx.where(mx.isnan(apart), 0, apart))[-2].item()
    return counted, _limit(logits.dtype)


def _apart(actual: mx.array, expected: mx.array) -> mx.array:
    """Return the distance of rows, relative to the norm of the expected rows. The distance is NaN
    if the expected row is not finite, which proves nothing, and infinite if only the actual row is
    not."""
    actual, expected = actual.astype(mx.float32), expected.astype(mx.float32)
    norm = mx.linalg.norm(expected, axis=-1)
    distance = mx.linalg.norm(actual - expected, axis=-1)
    return mx.where(mx.isnan(distance) & mx.isfinite(norm), mx.inf, distance / norm)


def _limit(dtype: mx.Dtype) -> float:
    if dtype != mx.float32:
        return HALF_LIMIT
    return LIMIT if on_cpu() else TF32_LIMIT


def rows_agree(model: TappedNetwork, make: Callable[[], list[Any]]) -> bool:
    """Return whether a pass over several rows, after the windows are full, agrees with passes over
    single rows. Warn if it does not. make: Returns empty caches."""
    taps = _taps(model, make())

    def agree(seed: int) -> bool:
        apart, dtype = _rows_apart(model, make(), taps, seed)
        return not apart > _limit(dtype)

    if any(of_rank_0(model.group, agree(seed)) for seed in range(ATTEMPTS)):
        return True
    _warn(
        model,
        "give several tokens at once other scores than one after the other: decoding without "
        "speculation",
    )
    return False


def absorb(model: TappedNetwork, make: Callable[[], list[Any]]) -> bool:
    """Absorb passes of a few rows from now on, if that changes results by no more than rounding.

    Absorbed rows must agree with single rows at least as well as expanded rows do. If they do not,
    warn, and leave attention unchanged.

    Args:
        make: Returns empty caches.
    Returns:
        Whether passes are absorbed. False also if the model has no latent attention."""
    attentions = latent.expanding(model.network)
    if not attentions:
        return False
    replace_in(model.network)
    taps = _taps(model, make())

    def agree(seed: int) -> bool:
        latent.release(attentions)
        expanded, _ = _rows_apart(model, make(), taps, seed)
        latent.intercept(attentions)
        before = latent.absorbed_calls()
        apart, dtype = _rows_apart(model, make(), taps, seed)
        rounding = ROUNDINGS * float(mx.finfo(dtype).eps)
        return latent.absorbed_calls() > before and apart <= max(NOISE * expanded, rounding)

    if any(of_rank_0(model.group, agree(seed)) for seed in range(ATTEMPTS)):
        return True
    latent.release(attentions)
    _warn(model, "do not take several rows in their latent: verifying drafts costs more than usual")
    return False


def _warn(model: TappedNetwork, what: str) -> None:
    text = f"mlx-lm's {type_name(model.network)} models {what}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _rows_apart(
    model: TappedNetwork, entries: list[Any], taps: list[str], seed: int
) -> tuple[float, mx.Dtype]:
    """Compare the rows of one pass with single rows.

    Args:
        entries: Empty caches.
        taps: The hidden state to compare; no layer after it is computed. Without one, logits.
        seed: Seed of the random tokens.
    Returns:
        The second-smallest relative difference of a row, and the dtype of the rows."""
    key = mx.random.key(seed)
    tokens = mx.random.randint(0, model.vocabulary, (1, BEGUN + ROWS), mx.int32, key=key)

    def states(part: mx.array, entries: list[Any]) -> mx.array:
        scores = model.run(part, entries, taps)
        return scores.hidden[taps[0]] if taps else scores.logits

    with model.lazily():
        model.run(tokens[:, :BEGUN], entries)
        _fill(entries, key)
        twin = copy.deepcopy(entries)
        fed = tokens[:, BEGUN:]
        together = states(fed, entries)
        alone = [states(fed[:, row : row + 1], twin) for row in range(ROWS)]
    expected = mx.concatenate(alone, axis=1)
    # A wrong mask changes all rows but one. A token at another expert mostly changes one row.
    second_least: Any = mx.sort(_apart(together, expected)[0])[1].item()
    return second_least, expected.dtype


def _fill(entries: list[Any], key: mx.array) -> None:
    """Fill attention caches up to the largest window without a pass over that many tokens.

    All keys that are put in are equal, so that attention weighs them equally. The values that leave
    the window next are large. A window that is one token too wide or too narrow therefore changes
    the result, even if the window is large."""
    caches = [slot.cache for slot in slots(entries)]
    for cache in caches:
        if type(cache) is RotatingKVCache:
            cache.max_size = min(cache.max_size, WIDEST)
    size = max((cache.max_size for cache in caches if type(cache) is RotatingKVCache), default=0)
    for cache in caches:
        if size <= BEGUN or type(cache) not in (KVCache, RotatingKVCache) or cache.keys is None:
            continue
        held = min(size, getattr(cache, "max_size", size))
        heads, width = cache.values.shape[1], cache.values.shape[3]
        # The largest values are near 2 ** 15. The largest number of float16 is twice that.
        scale = min(held, 32) * OUTWEIGHS ** mx.arange(ROWS, 0, -1)[:, None]
        leaving = scale * mx.random.normal((1, heads, ROWS, width), key=key)
        values = mx.pad(leaving[:, :, :held], [(0, 0), (0, 0), (0, max(0, held - ROWS)), (0, 0)])
        cache.values = values.astype(cache.values.dtype)
        cache.keys = mx.zeros((*cache.keys.shape[:2], held, cache.keys.shape[3]), cache.keys.dtype)
        cache.offset = size
        if type(cache) is RotatingKVCache:
            cache._idx = held


def _taps(model: TappedNetwork, entries: list[Any]) -> list[str]:
    """Return the name of the hidden state to compare, or an empty list if the model hides it.

    It is the output of the first layer after which no new kind of layer follows. Layers are of one
    kind if their modules and their caches are of the same classes and sizes."""
    layers = list(getattr(model.network, "layers", ()))
    kinds: dict[Hashable, int] = {}
    for number, layer in enumerate(layers):
        cache = entries[number] if len(entries) == len(layers) else None
        parts = tuple((path, type(module).__name__) for path, module in layer.named_modules())
        kinds.setdefault((parts, type(cache), getattr(cache, "max_size", None)), number)
    enough = max([LAYERS - 1, *kinds.values()])
    name = after(min(enough, len(layers) - 1))
    try:
        model.tap(name)
    except (OptionError, ValueError, TypeError):
        return []
    return [name]
