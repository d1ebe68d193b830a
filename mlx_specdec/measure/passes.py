"""Times passes of models as decoding runs them, behind one prompt.

Plain steps are pipelined, drafts go one token a pass, and a target's pass over several tokens runs
behind another pass, which hides the building of its graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..draft_length.speedup import RoundCost
from ..interfaces import Context, Model

Kind = tuple[str, int]
"""What is timed: ("steps", STEPS), ("chain", draft steps) or ("pass", tokens)."""
Clock = Callable[[], float]
"""Seconds since whenever."""
STEPS = 8
"""Plain steps in a row, of which all but the first are pipelined."""
CHAIN = 8
"""Draft steps in a row."""


@dataclass(frozen=True)
class PassCosts:
    """Medians in seconds.

    draft: a draft step over one token, None without a draft. passes: of the target, by how many
    tokens they saw. start: what the first pass of a round takes longer, since nothing runs yet
    while its graph is built. step: a plain, pipelined step, 0 where it was not asked for. replays:
    taking tokens back costs the target a pass. samples: how many stand behind each figure, at
    least. spread: median distance of the steps from their median, relative to it.
    """

    draft: float | None
    passes: Mapping[int, float]
    start: float = 0.0
    step: float = 0.0
    replays: bool = False
    samples: int = 1
    spread: float = 0.0

    def in_steps(self, step: float, other: float = 0.0) -> RoundCost:
        """The same in plain steps of `step` seconds; other: seconds that every round takes more."""
        return RoundCost(
            draft=(self.draft or 0.0) / step,
            passes={size: seconds / step for size, seconds in self.passes.items()},
            start=(self.start + other) / step,
            replays=self.replays,
        )


class PassTimer:
    """Times passes of one target, and of what drafts for it, as often as it is asked to.

    sizes: tokens of the target's passes. between: further sizes, which count only once they were
    measured more than once, since their neighbours tell almost as much. draft: whose steps run
    before such a pass, which may be the target itself; None measures no draft steps, and passes are
    behind a step of the target. steps: measure plain steps as well. chain: draft steps of which all
    but the first are behind another one. Of every kind the first sample warms up, and counts only
    until there is another.

    Everything but plain steps is taken back. Raises PromptError where a model cannot take its
    prompt.
    """

    def __init__(
        self,
        target: Context,
        *,
        sizes: Sequence[int] = (),
        between: Sequence[int] = (),
        draft: Context | None = None,
        steps: bool = False,
        chain: int = CHAIN,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._target = target
        self._draft = draft
        self._clock = clock
        self._between = frozenset(between)
        self._chain = chain
        kinds: list[Kind] = [("chain", 1)]
        kinds += [("chain", chain)] if draft is not None and chain > 1 else []
        kinds += [("steps", STEPS)] if steps else []
        kinds += [("pass", size) for size in (*sizes, *between)]
        self._samples: dict[Kind, list[float]] = {kind: [] for kind in kinds}

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What can be timed, as `time` takes it."""
        return tuple(self._samples)

    def turn(self, times: int = 1) -> None:
        """Time every kind of pass, `times` over."""
        for _ in range(times):
            for kind in self.kinds:
                self.time(kind)

    def time(self, kind: Kind) -> None:
        """Add one sample of a kind. Which tokens are fed does not matter."""
        name, count = kind
        contexts = [context for context in (self._target, self._draft) if context is not None]
        mx.synchronize()
        held = [context.lengths for context in contexts]
        started = self._clock()
        if name == "steps":
            self._plain_steps(count)
        else:
            self._round(count, 0) if name == "chain" else self._round(1, count)
        self._samples[kind].append(self._clock() - started)
        if name != "steps":
            for context, lengths in zip(contexts, held, strict=True):
                context.rewind(lengths)

    def expected(self, kind: Kind) -> float:
        """Seconds that `time` is going to take: what it took, or what others of its kind, or of
        any, did for so many tokens; 0 where nothing is known."""
        if self._samples[kind]:
            return self._samples[kind][-1]
        known = {each: max(samples) for each, samples in self._samples.items() if samples}
        alike = {each: seconds for each, seconds in known.items() if each[0] == kind[0]}
        rows = [seconds / each[1] for each, seconds in (alike or known).items()]
        return kind[1] * min(rows, default=0.0)

    def costs(self) -> PassCosts | None:
        """Medians of all samples; None before the first turn."""
        used = {
            kind: samples
            for kind, samples in self._samples.items()
            if kind[0] != "pass" or _counted(samples) > (kind[1] in self._between)
        }
        if not all(used.values()):
            return None
        alone = used["chain", 1]
        first = _typical(alone)
        steps = used.get(("steps", STEPS))
        draft = self._draft_step(first)
        return PassCosts(
            draft=draft,
            passes={
                n: max(0.0, _typical(s) - first) for (name, n), s in used.items() if name == "pass"
            },
            start=max(0.0, first - draft) if draft is not None else 0.0,
            step=_typical(steps) / STEPS if steps else 0.0,
            replays=self._target.replays,
            samples=min(map(_counted, used.values())),
            spread=_spread(steps or used.get(("chain", self._chain)) or alone),
        )

    def _draft_step(self, first: float) -> float | None:
        """Seconds of a draft step behind another one. first: of one alone."""
        if self._draft is None:
            return None
        if self._chain == 1:
            return first
        return max(0.0, (_typical(self._samples["chain", self._chain]) - first) / (self._chain - 1))

    def _plain_steps(self, count: int) -> None:
        """Each is submitted before the one before it is read."""
        pending = _submit(self._target, _any_token(), 0)
        for _ in range(count - 1):
            following = _submit(self._target, pending, 0)
            pending.tolist()
            pending = following
        pending.tolist()

    def _round(self, drafted: int, size: int) -> None:
        """`drafted` single steps, behind them a pass over `size` tokens, and one read."""
        chosen = _any_token()
        for _ in range(drafted):
            chosen = _submit(self._draft or self._target, chosen, 1)
        if size:
            # From the step before, as a round's drafted tokens are.
            chosen = _submit(self._target, mx.broadcast_to(chosen, (1, size)), size)
        chosen.tolist()


def opened(model: Model, prompt: Sequence[int]) -> Context:
    """A context that has seen all of a prompt. Raises PromptError where it cannot."""
    context = model.open(prompt)
    context.advance(mx.array([model.prefix(prompt)], dtype=mx.int32))
    context.evaluate()
    return context


def _any_token() -> mx.array:
    return mx.array([[1]], dtype=mx.int32)


def _submit(context: Context, tokens: mx.array, proposed: int) -> mx.array:
    """Greedy choice after the last of `tokens`, (1, 1), not waited for."""
    logits = context.advance(tokens, proposed=proposed).logits
    chosen = mx.argmax(logits, axis=-1)[:, -1:]
    mx.async_eval(chosen)
    return chosen


def _counted(samples: Sequence[float]) -> int:
    """How many samples count, the first of several not."""
    return max(len(samples) - 1, min(1, len(samples)))


def _typical(samples: Sequence[float]) -> float:
    return median(samples[1:] or samples)


def _spread(samples: Sequence[float]) -> float:
    middle = _typical(samples)
    return median(abs(one - middle) for one in samples[1:] or samples) / middle if middle else 0.0
