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
from ..contracts import Context, Model
from .methods import Length

EVERY = 9
"""Passes over 1 .. EVERY tokens are always measured: that is where V bends."""

TURNS = 20
"""Fewer turns than this leave medians that jump."""


@dataclass(frozen=True)
class PassCosts:
    """Medians in seconds. draft: a draft step over one token, None without a draft. passes: of the
    target, by how many tokens they saw."""

    draft: float | None
    passes: Mapping[int, float]


class PassTimer:
    """Times every kind of pass once a turn; turns belong between the texts that the costs are held
    against, so that both see the same machine.

    prompt: token ids. lengths: drafted tokens a round, whose passes are among the timed ones.
    clock: seconds. Raises PromptError where a model cannot take the prompt.
    """

    def __init__(
        self,
        pair: Pair,
        prompt: Sequence[int],
        lengths: Sequence[Length],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._rows = sorted({*range(1, EVERY + 1), *(n + 1 for n in lengths if n != "auto")})
        target = _opened(pair.target, prompt)
        self._kinds: list[tuple[Context, int]] = [(target, count) for count in self._rows]
        self._drafts = pair.draft is not None
        if pair.draft is not None:
            heard = prompt if pair.translation is None else pair.translation.feed(prompt)
            self._kinds.append((_opened(pair.draft, heard), 1))
        self._seconds: list[list[float]] = [[] for _ in self._kinds]
        self._run(keep=False)

    def turn(self, times: int = 1) -> None:
        """Time every kind of pass, `times` over."""
        for _ in range(times):
            self._run(keep=True)

    def costs(self) -> PassCosts | None:
        """Medians of all complete turns; None before the first."""
        turns = len(self._seconds[-1])
        if not turns:
            return None
        medians = [median(kept[:turns]) for kept in self._seconds]
        draft = medians.pop() if self._drafts else None
        return PassCosts(draft, dict(zip(self._rows, medians, strict=True)))

    def _run(self, keep: bool) -> None:
        for (context, count), kept in zip(self._kinds, self._seconds, strict=True):
            seconds = _one_pass(context, count, self._clock)
            if keep:
                kept.append(seconds)


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
