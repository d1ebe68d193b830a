"""What passes cost on this machine: one draft step, and target passes over 1 .. m tokens.

Knows models and a clock. Passes are measured alone, each waited for, from the state after a prompt;
what rounds really took is in the samples' own statistics.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..assemble import Pair
from ..contracts import Context, Model, Progress
from .methods import Length

EVERY = 9
"""Passes over 1 .. EVERY tokens are always measured: that is where V bends."""


@dataclass(frozen=True)
class PassCosts:
    """Medians in seconds. draft: a draft step over one token, None without a draft. passes: of the
    target, by how many tokens they saw."""

    draft: float | None
    passes: Mapping[int, float]


def pass_costs(
    pair: Pair,
    prompt: Sequence[int],
    lengths: Sequence[Length],
    *,
    turns: int = 20,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> PassCosts:
    """Measure every kind of pass `turns` times, in turns, and take medians.

    prompt: token ids. lengths: drafted tokens a round, whose passes are among the measured ones.
    """
    rows = {*range(1, EVERY + 1), *(n + 1 for n in lengths if n != "auto")}
    target = _opened(pair.target, prompt)
    kinds: list[tuple[Context, int]] = [(target, count) for count in sorted(rows)]
    if pair.draft is not None:
        heard = prompt if pair.translation is None else pair.translation.feed(prompt)
        kinds.append((_opened(pair.draft, heard), 1))
    seconds: list[list[float]] = [[] for _ in kinds]
    for turn in range(turns + 1):
        if progress is not None:
            progress(turn, turns + 1)
        for (context, count), kept in zip(kinds, seconds, strict=True):
            spent = _one_pass(context, count, clock)
            if turn:  # the first turn warms up
                kept.append(spent)
    if progress is not None:
        progress(turns + 1, turns + 1)
    medians = [median(kept) for kept in seconds]
    draft = medians.pop() if pair.draft is not None else None
    return PassCosts(draft, dict(zip(sorted(rows), medians, strict=True)))


def _opened(model: Model, prompt: Sequence[int]) -> Context:
    context = model.open(prompt)
    last = mx.array([model.prefix(prompt)[-1:]], dtype=mx.int32)
    mx.eval(context.advance(last).logits)
    return context


def _one_pass(context: Context, count: int, clock: Callable[[], float]) -> float:
    """Seconds of a pass over tokens that are then taken back; which ones does not matter."""
    length = context.lengths
    tokens = mx.array([[2] * count], dtype=mx.int32)
    mx.eval(tokens)
    started = clock()
    mx.eval(context.advance(tokens, proposed=count).logits)
    seconds = clock() - started
    context.rewind(length)
    return seconds
