"""What passes cost on this machine: one draft step, and target passes over 1 .. m tokens.

Knows models and a clock. Every pass is measured where a round has it, behind another one that was
submitted and not waited for: building its graph then costs nothing that the text would wait for.
What rounds really took is in the samples' own statistics.
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


CHAIN = 5
"""Draft steps of which all but the first are behind another one."""


@dataclass(frozen=True)
class PassCosts:
    """Medians in seconds. draft: a draft step over one token, None without a draft. passes: of the
    target, by how many tokens they saw. start: what the first pass of a round takes longer, since
    nothing runs yet while its graph is built."""

    draft: float | None
    passes: Mapping[int, float]
    start: float = 0.0


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
        self._target = _opened(pair.target, prompt)
        self._first = self._target
        self._contexts = [self._target]
        if pair.draft is not None:
            heard = prompt if pair.translation is None else pair.translation.feed(prompt)
            self._first = _opened(pair.draft, heard)
            self._contexts.append(self._first)
        self.forget()
        self.turn()
        self.forget()

    def turn(self, times: int = 1) -> None:
        """Time every kind of pass, `times` over."""
        for _ in range(times):
            for count, kept in self._chains.items():
                kept.append(self._timed(count))
            for rows, kept in self._behind.items():
                kept.append(self._timed(1, rows))
            self._turns += 1

    def forget(self) -> None:
        """Drop what was measured so far, which was warming up."""
        self._chains: dict[int, list[float]] = {1: [], CHAIN: []}
        self._behind: dict[int, list[float]] = {rows: [] for rows in self._rows}
        self._turns = 0

    def costs(self) -> PassCosts | None:
        """Medians of all complete turns; None before the first."""
        if not self._turns:
            return None
        alone, chain = (median(kept[: self._turns]) for kept in self._chains.values())
        step = max(0.0, (chain - alone) / (CHAIN - 1))
        passes = {
            rows: max(0.0, median(kept[: self._turns]) - alone)
            for rows, kept in self._behind.items()
        }
        return PassCosts(
            None if self._first is self._target else step, passes, max(0.0, alone - step)
        )

    def _timed(self, first: int, rows: int = 0) -> float:
        """Seconds of `first` single steps and, behind them, a pass over `rows` tokens; all of it is
        taken back. Which tokens does not matter."""
        held = [(context, context.lengths) for context in self._contexts]
        started = self._clock()
        chosen = mx.array([[2]], dtype=mx.int32)
        for _ in range(first):
            chosen = _submitted(self._first, chosen)
        if rows:
            # From the rows before, as a round's drafted tokens are.
            chosen = _submitted(self._target, mx.broadcast_to(chosen, (1, rows)))
        chosen.tolist()
        seconds = self._clock() - started
        for context, lengths in held:
            context.rewind(lengths)
        return seconds


def _opened(model: Model, prompt: Sequence[int]) -> Context:
    context = model.open(prompt)
    last = mx.array([model.prefix(prompt)[-1:]], dtype=mx.int32)
    mx.eval(context.advance(last).logits)
    return context


def _submitted(context: Context, tokens: mx.array) -> mx.array:
    """Greedy choice after the last of `tokens`, (1, 1), not waited for."""
    logits = context.advance(tokens, proposed=tokens.shape[1]).logits
    chosen = mx.argmax(logits, axis=-1)[:, -1:]
    mx.async_eval(chosen)
    return chosen
