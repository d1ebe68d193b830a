"""Trials that show whether a model of mlx-lm supports speculation, batches and absorption.

Speculation requires that a pass over several rows computes the same as passes over single rows.
Batches require that each sequence can have its own position. Some models fail, because of a mask of
the wrong type, or a window that is one token wider for all rows but the first. A list of such
models would soon be outdated. Differences from rounding are allowed."""

import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ...errors import OptionError, first_line
from ...types import after, rectangle
from ..base import family_of
from ..distributed.sharding import of_rank_0
from ..number_format import on_cpu
from .attention import absorbed_calls, expanding, intercept, release, replace_in
from .caches import MakeCache
from .context import DecoderOnlyContext
from .network import CapturingNetwork
from .recurrence import Recurrences

BEGUN, NARROW = 5, 4
"""Number of tokens in the cache before the compared rows, and size of the windows in trials, in
tokens. No row is then the first of its sequence, and windows are full."""
ROWS = 4
"""Number of rows that are compared."""
LEAST_LAYERS = 4
"""The least number of layers to compute. More are computed if a later layer is of a new kind."""
ATTEMPTS = 3
"""Number of attempts, each with other tokens. In half precision, rounding can send a token to
another expert, so that a single attempt proves no fault."""
TRIAL_LENGTHS = ((3, 1), (7, 4), (6, 2), (7, 2), (9, 3))
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
ROUNDINGS, EXTRA_ROUNDING = 8, 2
"""Absorbed rows may differ from single rows by so many machine epsilons of the dtype, or by this
factor more than expanded rows do: differences from rounding vary."""
Open = Callable[..., DecoderOnlyContext]
"""A function that opens a context of a number of sequences (by default 1)."""


def try_batches(model: CapturingNetwork, open_: Open) -> tuple[int | None, str]:
    """Compare the logits of sequences in a batch with the logits of single sequences.

    Several attempts are made with each number of mask axes, and one success is enough. If all fail,
    the last one gives the reason. Rank 0 decides for all ranks that share the model.

    Returns:
        The number of axes that masks need and "", or None and why the model cannot decode batches,
        in one line."""
    if open_().states and not of_rank_0(model.group, _begins_with_zeros(model, open_)):
        return None, "the recurrent state of an empty sequence is not zero"
    reason = ""
    for seed, axes in itertools.product(range(ATTEMPTS), MASK_AXES):
        try:
            apart, limit = _batch_apart(model, open_, axes, seed)
            reason = (
                f"in a trial its logits were off by {apart:.2g} of their norm; {limit:g} is allowed"
            )
        except Exception as problem:
            # Some models need one offset for all sequences, and fail.
            apart, limit = math.inf, 0.0
            reason = f"a trial pass failed ({first_line(problem)})"
        if of_rank_0(model.group, not apart > limit):
            return axes, ""
    return None, reason


def _begins_with_zeros(model: CapturingNetwork, open_: Open) -> bool:
    """Return whether a sequence may begin with zeros as its recurrent state. Sequences that join a
    batch before their first token get them."""
    tokens = mx.arange(ROWS, dtype=mx.int32)[None] % model.vocabulary
    first, second = open_(1), open_(1)
    expected = first.advance(tokens).logits[0]
    for empty, written in zip(second.states, first.states, strict=True):
        zeros = [None if array is None else mx.zeros_like(array) for array in written.cache]
        empty.state = zeros, None, None
    apart = _apart(second.advance(tokens).logits[0], expected)
    least: Any = mx.min(apart).item()
    return not least > _limit(expected.dtype)


def _batch_apart(model: CapturingNetwork, open_: Open, axes: int, seed: int) -> tuple[float, float]:
    """Decode a batch, some of whose tokens are rewound, and the same sequences alone.

    Returns:
        The second-largest relative difference of a sequence's logits, and the limit for it. The
        largest one is ignored, because rounding may send a token to another expert."""
    keys = mx.random.split(mx.random.key(seed), len(TRIAL_LENGTHS))
    tokens: list[list[int]] = [
        mx.random.randint(0, model.vocabulary, (count,), mx.int32, key=key).tolist()  # type: ignore[misc]
        for key, (count, _) in zip(keys, TRIAL_LENGTHS, strict=True)
    ]

    def opened(count: int) -> DecoderOnlyContext:
        context = _narrowed(open_(count))
        context.rows.mask_axes = lambda: axes
        return context

    batch, fed = opened(len(TRIAL_LENGTHS)), tokens
    for again in (0, 1):
        batch.advance(rectangle(fed), proposed=max(map(len, fed)))
        # The second time every other sequence keeps a token, so that both states are merged.
        left = [more - again * (row % 2) for row, (_, more) in enumerate(TRIAL_LENGTHS)]
        batch.rewind(tuple(len(row) - n for row, n in zip(tokens, left, strict=True)))
        fed = [row[-n:] for row, n in zip(tokens, left, strict=True)]
    logits = batch.advance(rectangle(fed)).logits
    together = mx.stack([logits[row, len(part) - 1] for row, part in enumerate(fed)])
    alone = [opened(1).advance(mx.array([sequence])).logits[0, -1] for sequence in tokens]
    apart = _apart(together, mx.stack(alone))
    counted: Any = mx.sort(mx.where(mx.isnan(apart), 0, apart))[-2].item()
    return counted, _limit(logits.dtype)


def _narrowed(context: DecoderOnlyContext) -> DecoderOnlyContext:
    """Make the windows of a context smaller than the sequences of a trial."""
    for window in context.rows.windows.values():
        window.size = min(window.size, NARROW)
    return context


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


def rows_agree(model: CapturingNetwork, open_: Open) -> bool:
    """Return whether a pass over several rows, after the windows are full, agrees with passes over
    single rows. The pass must also be rewindable to any of its rows. Warn if it is not so."""
    if not open_().restores:
        _warn(model, "cannot go back to a part of a pass: decoding without speculation")
        return False
    if _agrees(model, partial(_rows_apart, model, open_)):
        return True
    _warn(
        model,
        "give several tokens at once other scores than one after the other: decoding without "
        "speculation",
    )
    return False


def try_recurrences(model: CapturingNetwork, make: Sequence[MakeCache]) -> Recurrences | None:
    """Return the recurrences of a model. Return None if it has none, or if repeating them over the
    first rows of a pass gives another state than a shorter pass."""
    empty = DecoderOnlyContext(model, make, 1)
    if not empty.states:
        return None
    empty.rows.advance(mx.zeros((1, 2), dtype=mx.int32), 0)
    recurrences = Recurrences(model.network, empty.entries, empty.states)

    def apart(seed: int) -> tuple[float, mx.Dtype]:
        try:
            return _states_apart(model, make, recurrences, seed)
        except Exception:  # A call cannot be repeated over fewer rows.
            return math.inf, mx.float32

    return recurrences if _agrees(model, apart) else None


def _agrees(model: CapturingNetwork, apart: Callable[[int], tuple[float, mx.Dtype]]) -> bool:
    """Return whether one of several attempts finds no difference beyond rounding. Rank 0 decides
    for all ranks that share the model. apart: Returns a difference and the dtype for a seed."""

    def agree(seed: int) -> bool:
        difference, dtype = apart(seed)
        return not difference > _limit(dtype)

    return any(of_rank_0(model.group, agree(seed)) for seed in range(ATTEMPTS))


def _states_apart(
    model: CapturingNetwork, make: Sequence[MakeCache], recurrences: Recurrences, seed: int
) -> tuple[float, mx.Dtype]:
    """Compare states that were advanced over the first rows of a pass with the states after a pass
    over these rows only.

    Returns:
        The largest difference of any array, relative to the array's norm, and the widest dtype of
        all arrays."""
    tokens = _random_tokens(model, seed)
    apart, dtypes = [], []
    enough = _layers_to_try(model, DecoderOnlyContext(model, make, 1))
    with model.lazily():
        for rows in range(1, ROWS):
            states = []
            for fed in (rows, ROWS):
                context = DecoderOnlyContext(model, make, 1, recurrences=recurrences)
                context.advance(tokens[:, :BEGUN])
                context.advance(tokens[:, BEGUN : BEGUN + fed], proposed=fed - 1)
                context.rewind_states((BEGUN + rows,), context.lengths)
                states.append(tree_flatten([cache.state for cache in context.states[:enough]]))
            for (_, expected), (_, actual) in zip(*states, strict=True):
                if isinstance(expected, mx.array):
                    difference = _apart(actual.reshape(1, -1), expected.reshape(1, -1))
                    # The norm of a state can be zero.
                    apart.append(mx.where(mx.all(actual == expected), 0, difference))
                    dtypes.append(expected.dtype)
    largest: Any = mx.max(mx.concatenate(apart)).item()
    return largest, max(dtypes, key=lambda dtype: dtype.size)


def absorb(model: CapturingNetwork, open_: Open) -> bool:
    """Absorb passes of a few rows from now on, if that changes results by no more than rounding.

    Absorbed rows must agree with single rows at least as well as expanded rows do. If they do not,
    warn, and leave attention unchanged.

    Returns:
        Whether passes are absorbed. False also if the model has no latent attention."""
    expands = expanding(model.network)
    if not expands:
        return False
    replace_in(model.network)
    before = absorbed_calls()

    def agree(seed: int) -> bool:
        release(expands)
        expanded, _ = _rows_apart(model, open_, seed)
        intercept(expands)
        apart, dtype = _rows_apart(model, open_, seed)
        rounding = ROUNDINGS * float(mx.finfo(dtype).eps)
        return absorbed_calls() > before and apart <= max(EXTRA_ROUNDING * expanded, rounding)

    if any(of_rank_0(model.group, agree(seed)) for seed in range(ATTEMPTS)):
        return True
    release(expands)
    _warn(model, "do not take several rows in their latent: verifying drafts costs more than usual")
    return False


def _warn(model: CapturingNetwork, what: str) -> None:
    text = f"mlx-lm's {family_of(model.network)} models {what}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _rows_apart(model: CapturingNetwork, open_: Open, seed: int) -> tuple[float, mx.Dtype]:
    """Compare the rows of one pass over random tokens with single rows.

    Returns:
        The second-smallest relative difference of a row, and the dtype of the rows."""
    tokens, hidden = _random_tokens(model, seed), _captures(model, open_())

    def states(size: int) -> mx.array:
        context = _narrowed(open_())
        context.advance(tokens[:, :BEGUN])
        parts = [tokens[:, at : at + size] for at in range(BEGUN, BEGUN + ROWS, size)]
        scores = [context.advance(part, hidden=hidden) for part in parts]
        return mx.concatenate([s.hidden[hidden[0]] if hidden else s.logits for s in scores], axis=1)

    with model.lazily():
        together, expected = states(ROWS), states(1)
    # A wrong mask changes all rows but one. A token at another expert mostly changes one row.
    second_least: Any = mx.sort(_apart(together, expected)[0])[1].item()
    return second_least, expected.dtype


def _random_tokens(model: CapturingNetwork, seed: int) -> mx.array:
    key = mx.random.key(seed)
    return mx.random.randint(0, model.vocabulary, (1, BEGUN + ROWS), mx.int32, key=key)


def _layers_to_try(model: CapturingNetwork, context: DecoderOnlyContext) -> int:
    """Return the number of layers after which no new kind of layer follows. Layers are of one kind
    if their modules and their caches are of the same classes and sizes."""
    layers = list(getattr(model.network, "layers", ()))
    kinds: dict[Hashable, int] = {}
    for number, layer in enumerate(layers):
        cache = context.entries[number] if len(context.entries) == len(layers) else None
        parts = tuple((path, type(module).__name__) for path, module in layer.named_modules())
        kinds.setdefault((parts, type(cache), getattr(cache, "max_size", None)), number)
    return min(max([LEAST_LAYERS - 1, *kinds.values()]) + 1, len(layers))


def _captures(model: CapturingNetwork, context: DecoderOnlyContext) -> list[str]:
    """Return the name of the hidden state to compare, or an empty list if the model hides it, so
    that logits are compared. It is the output of the last layer to try, the last one computed."""
    name = after(_layers_to_try(model, context) - 1)
    try:
        model.capture(name)
    except (OptionError, ValueError, TypeError):
        return []
    return [name]
