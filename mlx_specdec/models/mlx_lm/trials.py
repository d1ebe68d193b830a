"""What is tried out on a model of mlx-lm, since no list of families would hold. Speculation rests
on a pass over several rows computing what passes over single rows compute, and batches on a
position for each sequence. Some models break that, by a mask of the wrong type or a window one
token wider for all rows but the first. Differences from rounding are no failure."""

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
"""Tokens that both have seen before, at least: no row is then the first of its sequence."""
ROWS = 4
LAYERS = 4
"""At least so many are computed, and all up to the first of the last new kind."""
ATTEMPTS = 3
"""With other tokens: in half precision, rounding may send a token to another expert."""
WIDEST = 1 << 16
"""Keys of a window that is filled; a wider one, which only users ask for, treats rows alike."""
OUTWEIGHS = 4
"""How much larger values are than those that leave the window after them."""
TRIED = ((3, 1), (7, 4), (6, 2), (7, 2), (9, 3))
"""Tokens of each sequence of a trial batch, and how many of them are rewound and fed again. No two
sequences are rewound to the same length, so that one position for all is wrong for all but one."""
MASK_AXES = (4, 5)
"""Numbers of axes that masks may need; see `Rows`."""
LIMIT, TF32_LIMIT, HALF_LIMIT = 0.001, 0.01, 0.1
"""Largest difference of two rows, relative to their norm, that counts as rounding: in float32 on
the CPU, in float32 elsewhere, and in half precision. An accelerator may multiply float32 in TF32,
which moves rows by up to 0.005. A wrong mask moves them by 0.1 to 1."""
ROUNDINGS = 8
"""Of the number format, which are no difference at all."""
NOISE = 2
"""A difference from rounding is another one with other tokens, by about so much."""


@dataclass(frozen=True)
class BatchTrial:
    """The outcome of trial batches, whose sequences have different lengths.

    mask_axes: Number of axes of the masks that batches need; None if the model cannot be batched.
    reason: Why the model cannot be batched, in one line; "" if it can."""

    mask_axes: int | None
    reason: str = ""


def misfit(model: TappedNetwork, make: Sequence[MakeCache]) -> str:
    """Return why a model cannot be called with such caches at all, in one line; "" if it can.
    Nothing is computed."""
    try:
        with model.lazily():
            DecoderOnlyContext(model, make, 1).advance(mx.zeros((1, 2), dtype=mx.int32))
    except Exception as problem:
        # Some models' arithmetic looks into mlx-lm's caches.
        return f"it fails with caches of several sequences ({first_line(problem)})"
    return ""


def try_batches(model: TappedNetwork, make: Sequence[MakeCache]) -> BatchTrial:
    """Compare the logits of sequences in a batch with those that the sequences get alone. The least
    difference of all attempts is the reason against batches. Rank 0 decides for all ranks."""
    reasons: dict[float, str] = {}
    for seed, axes in itertools.product(range(ATTEMPTS), MASK_AXES):
        try:
            apart, limit = _batch_apart(model, make, axes, seed)
            reason = (
                f"in a trial its logits were off by {apart:.2g} of their norm; {limit:g} is allowed"
            )
        except Exception as problem:
            # Some models' arithmetic takes one offset for all sequences.
            apart, limit = math.inf, 0.0
            reason = f"a trial pass failed ({first_line(problem)})"
        if of_rank_0(model.group, not apart > limit):
            return BatchTrial(axes)
        reasons.setdefault(apart, reason)
    return BatchTrial(None, reasons[min(reasons)])


def _batch_apart(
    model: TappedNetwork, make: Sequence[MakeCache], axes: int, seed: int
) -> tuple[float, float]:
    """Return how far a batch, some of whose tokens were rewound, is from each sequence alone, and
    the limit. The sequence that is farthest off does not count."""
    keys = mx.random.split(mx.random.key(seed), len(TRIED))
    tokens: list[list[int]] = [
        mx.random.randint(0, model.vocabulary, (count,), mx.int32, key=key).tolist()  # type: ignore[misc]
        for key, (count, _) in zip(keys, TRIED, strict=True)
    ]
    batch = DecoderOnlyContext(model, make, len(TRIED), axes)
    again = [row[-more:] for row, (_, more) in zip(tokens, TRIED, strict=True)]
    batch.advance(rectangle(tokens), proposed=max(map(len, tokens)))
    batch.rewind(tuple(count - more for count, more in TRIED))
    logits = batch.advance(rectangle(again)).logits
    together = mx.stack([logits[row, more - 1] for row, (_, more) in enumerate(TRIED)])
    alone = [model.run(mx.array([sequence]), None).logits[0, -1] for sequence in tokens]
    apart = _apart(together, mx.stack(alone))
    # Rounding may send a token of one sequence to another expert.
    counted: Any = mx.sort(mx.where(mx.isnan(apart), 0, apart))[-2].item()
    return counted, _limit(logits.dtype)


def _apart(some: mx.array, expected: mx.array) -> mx.array:
    """Return the distance of rows relative to the expected rows' norm: NaN if the expected row has
    NaN or infinite numbers, which proves nothing, and infinite if only the other row has them."""
    some, expected = some.astype(mx.float32), expected.astype(mx.float32)
    norm = mx.linalg.norm(expected, axis=-1)
    distance = mx.linalg.norm(some - expected, axis=-1)
    return mx.where(mx.isnan(distance) & mx.isfinite(norm), mx.inf, distance / norm)


def _limit(dtype: mx.Dtype) -> float:
    if dtype != mx.float32:
        return HALF_LIMIT
    return LIMIT if on_cpu() else TF32_LIMIT


def rows_agree(model: TappedNetwork, make: Callable[[], list[Any]]) -> bool:
    """Compare a pass over some rows, past caches' windows, with single rows, and warn where they
    differ. make: returns empty caches."""
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
    """Have passes of a few rows attend to the latent of a cache, as single rows do, if the rows
    then agree with single rows at least as well as before, or but for rounding. Warn where they do
    not. make: returns empty caches."""
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
    """Return how far rows of one pass are from single rows, and the number format. No layer after
    the tapped one is computed. entries: empty caches."""
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
    # A wrong mask shows in all rows but one, a token at another expert mostly in one.
    second_least: Any = mx.sort(_apart(together, expected)[0])[1].item()
    return second_least, expected.dtype


def _fill(entries: list[Any], key: mx.array) -> None:
    """Put attention caches past the largest window without a pass over so many tokens. Old keys are
    alike, and the values that leave the window next are large, so that one too many or too few of
    them shows however wide the window is."""
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
        # The largest are near 2 ** 15: float16 ends at twice that.
        scale = min(held, 32) * OUTWEIGHS ** mx.arange(ROWS, 0, -1)[:, None]
        leaving = scale * mx.random.normal((1, heads, ROWS, width), key=key)
        values = mx.pad(leaving[:, :, :held], [(0, 0), (0, 0), (0, max(0, held - ROWS)), (0, 0)])
        cache.values = values.astype(cache.values.dtype)
        cache.keys = mx.zeros((*cache.keys.shape[:2], held, cache.keys.shape[3]), cache.keys.dtype)
        cache.offset = size
        if type(cache) is RotatingKVCache:
            cache._idx = held


def _taps(model: TappedNetwork, entries: list[Any]) -> list[str]:
    """The output of the first layer by which all kinds were seen; none where it is not shown."""
    layers = list(getattr(model.network, "layers", ()))
    kinds: dict[Hashable, int] = {}
    for number, layer in enumerate(layers):
        cache = entries[number] if len(entries) == len(layers) else None
        look = tuple((path, type(module).__name__) for path, module in layer.named_modules())
        kinds.setdefault((look, type(cache), getattr(cache, "max_size", None)), number)
    enough = max([LAYERS - 1, *kinds.values()])
    name = after(min(enough, len(layers) - 1))
    try:
        model.tap(name)
    except (OptionError, ValueError, TypeError):
        return []
    return [name]
