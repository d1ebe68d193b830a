"""What is tried out on a model of mlx-lm, since no list of families would hold. Speculation rests
on a pass over several rows computing what passes over single rows compute, and batches on a
position for each sequence. Some models break that, by a mask of the wrong type or a window one
token wider for all rows but the first. Differences from rounding are no failure."""

import copy
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from ...errors import OptionError
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
TRIED = ((3, 1), (7, 4), (5, 2))
"""Tokens of each sequence of a batch, and how many of them are taken back and fed again."""
LIMIT, TF32_LIMIT, HALF_LIMIT = 0.001, 0.01, 0.1
"""Largest difference of two rows, relative to their norm, that counts as rounding: in float32 on
the CPU, in float32 elsewhere, and in half precision. An accelerator may multiply float32 in TF32,
which moves rows by up to 0.005. A wrong mask moves them by 0.1 to 1."""
ROUNDINGS = 8
"""Of the number format, which are no difference at all."""
NOISE = 2
"""A difference from rounding is another one with other tokens, by about so much."""


def fits(model: TappedNetwork, make: Sequence[MakeCache]) -> bool:
    """Return whether a model can be called with such caches at all. Nothing is computed."""
    try:
        DecoderOnlyContext(model, make, 1).advance(mx.zeros((1, 2), dtype=mx.int32))
    except Exception:
        # Some models' arithmetic looks into mlx-lm's caches.
        return False
    return True


def mask_axes(model: TappedNetwork, make: Sequence[MakeCache]) -> int | None:
    """Return the number of axes of masks with which sequences of different lengths get from a batch
    the logits that they get alone, or None."""
    return next((axes for axes in (4, 5) if _batches(model, make, axes)), None)


def _batches(model: TappedNetwork, make: Sequence[MakeCache], axes: int) -> bool:
    """Whether a batch, some of whose tokens were taken back, gives each sequence its logits."""
    keys = mx.random.split(mx.random.key(0), len(TRIED))
    tokens: list[list[int]] = [
        mx.random.randint(0, model.vocabulary, (count,), mx.int32, key=key).tolist()  # type: ignore[misc]
        for key, (count, _) in zip(keys, TRIED, strict=True)
    ]
    batch = DecoderOnlyContext(model, make, len(TRIED), axes)
    again = [row[-more:] for row, (_, more) in zip(tokens, TRIED, strict=True)]
    try:
        batch.advance(rectangle(tokens), proposed=max(map(len, tokens)))
        batch.rewind(tuple(count - more for count, more in TRIED))
        logits = batch.advance(rectangle(again)).logits
        together = mx.stack([logits[row, more - 1] for row, (_, more) in enumerate(TRIED)])
        alone = [model.run(mx.array([whole]), None).logits[0, -1] for whole in tokens]
        agree = bool(mx.all(_apart(together, mx.stack(alone)) <= _limit(logits.dtype)).item())
    except Exception:
        # Some models' arithmetic takes one offset for all sequences.
        return False
    return of_rank_0(model.group, agree)


def _apart(some: mx.array, expected: mx.array) -> mx.array:
    some, expected = some.astype(mx.float32), expected.astype(mx.float32)
    return mx.linalg.norm(some - expected, axis=-1) / mx.linalg.norm(expected, axis=-1)


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
    """Return how far rows of one pass are from single rows, and the number format. entries: empty
    caches."""
    key = mx.random.key(seed)
    tokens = mx.random.randint(0, model.vocabulary, (1, BEGUN + ROWS), mx.int32, key=key)
    model.run(tokens[:, :BEGUN], entries)
    _fill(entries, key)
    twin = copy.deepcopy(entries)
    fed = tokens[:, BEGUN:]

    def states(part: mx.array, entries: list[Any]) -> mx.array:
        scores = model.run(part, entries, taps)
        return scores.hidden[taps[0]] if taps else scores.logits

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
