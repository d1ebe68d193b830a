"""Seconds of one model's passes on this machine.

Knows a Model, a clock and how decoding calls a model: plain steps pipelined, drafts one token a
pass, a target's pass over several tokens behind another pass, which hides the building of its
graph. Knows no outlines and no pairs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx

from ..contracts import Model, Progress

Clock = Callable[[], float]
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17)
"""Rows of the passes that are measured; those between are taken from their neighbours."""
STEPS = 8
FEWEST = 1


@dataclass(frozen=True)
class Timings:
    """Medians in seconds. step: a plain, pipelined step. draft: a step of a proposal behind another
    one. passes: over so many tokens, behind a step. start: what a round's first pass takes longer,
    since nothing runs yet while its graph is built. replays: taking tokens back costs a pass.
    spread: median distance of the plain or draft steps from their median, relative to it."""

    step: float
    draft: float
    passes: Mapping[int, float]
    start: float = 0.0
    replays: bool = False
    spread: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """What to measure of a model. steps: plain ones. drafts: of a proposal. sizes: of passes."""

    steps: bool = False
    drafts: bool = False
    sizes: Sequence[int] = ()


class Probe:
    """One model behind a prompt, measured as often as it is asked to be.

    prompt: its length in tokens. clock: seconds.
    """

    def __init__(
        self, model: Model, prompt: int, wanted: Wanted, clock: Clock = time.perf_counter
    ) -> None:
        ids = [7919 * place % model.vocabulary for place in range(1, prompt + 1)]
        self._context = model.open(ids)
        self._context.advance(mx.array([model.prefix(ids)[-1:]], dtype=mx.int32))
        self._token = mx.array([[ids[-1]]], dtype=mx.int32)
        self._wanted = wanted
        self._clock = clock
        self.forget()

    def turn(self) -> None:
        """Measure everything that is wanted once."""
        if self._wanted.steps:
            self._step.append(self._timed(self._plain) / STEPS)
        if self._wanted.drafts:
            for count, kept in self._drafts.items():
                kept.append(self._timed(partial(self._propose, count)))
                self._take_back(0)
        for size in self._wanted.sizes:
            self._passes[size].append(self._timed(partial(self._pass, size)))
            self._take_back(2)

    def forget(self) -> None:
        """Drop what was measured so far, which was warming up."""
        self._step: list[float] = []
        self._drafts: dict[int, list[float]] = {1: [], STEPS: []}
        self._passes: dict[int, list[float]] = {size: [] for size in self._wanted.sizes}

    def timings(self) -> Timings:
        """Medians of everything; 0 for what is not wanted."""
        step = median(self._step or [0.0])
        alone, chain = (median(kept or [0.0]) for kept in self._drafts.values())
        draft = max(0.0, (chain - alone) / (STEPS - 1))
        return Timings(
            step=step,
            draft=draft,
            passes={size: max(0.0, median(kept) - step) for size, kept in self._passes.items()},
            start=max(0.0, alone - draft),
            replays=bool(getattr(self._context, "replays", False)),
            spread=_spread(self._step or self._drafts[STEPS]),
        )

    def _timed(self, work: Callable[[], None]) -> float:
        mx.synchronize()
        self._base = self._context.lengths[0]
        started = self._clock()
        work()
        return self._clock() - started

    def _plain(self) -> None:
        """STEPS plain steps, each submitted before the one before it is read."""
        pending = self._choose(self._token, 0)
        for _ in range(STEPS - 1):
            following = self._choose(pending, 0)
            _read(pending)
            pending = following
        _read(pending)

    def _propose(self, count: int) -> None:
        """`count` drafted tokens, read once."""
        token = self._token
        for _ in range(count):
            token = self._choose(token, 1)
        _read(token)

    def _pass(self, size: int) -> None:
        """A pass over `size` tokens behind a plain step."""
        before = self._choose(self._token, 0)
        _read(self._choose(mx.broadcast_to(before, (1, size)), size - 1))

    def _choose(self, tokens: mx.array, proposed: int) -> mx.array:
        """One pass and its greedy choices, submitted."""
        chosen = mx.argmax(self._context.advance(tokens, proposed=proposed).logits, axis=-1)
        mx.async_eval(chosen)
        return chosen

    def _take_back(self, kept: int) -> None:
        self._context.rewind((self._base + kept,))


def measure(
    probes: Sequence[Probe],
    *,
    turns: int,
    seconds: float,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> None:
    """Measure all probes in turns, so that a drift of the machine meets them all.

    turns: how often, after a first one that warms up; fewer, but at least FEWEST, once `seconds`
    are over.
    """
    report = progress or _ignore
    report(0, turns + 1)
    started = clock()
    for turn in range(turns + 1):
        if turn > FEWEST and clock() - started > seconds:
            break
        for probe in probes:
            probe.turn()
            if turn == 0:
                probe.forget()
        report(turn + 1, turns + 1)
    report(turns + 1, turns + 1)


def _spread(samples: Sequence[float]) -> float:
    middle = median(samples or [0.0])
    return median(abs(sample - middle) for sample in samples) / middle if middle else 0.0


def _ignore(done: int, total: int) -> None:
    return None


def _read(array: mx.array) -> Any:
    return array.tolist()
