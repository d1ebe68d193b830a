"""Times passes of models as decoding runs them, behind one prompt."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..interfaces import Context, Model, Progress, ignore_progress
from ..models.outline import Outline
from .prediction import RoundCost

Kind = tuple[str, int]
"""What is timed: ("steps", STEPS), ("chain", draft steps) or ("pass", tokens)."""
Clock = Callable[[], float]
"""Returns seconds since any fixed moment."""
STEPS = 8
"""Plain steps in a row, of which all but the first are pipelined."""
CHAIN = 8
"""Draft steps in a row."""
SIZES = (1, 2, 3, 5, 9, 17, 4, 6, 7, 8, 11, 13)
"""Tokens of the passes that are measured, in this order; other sizes are interpolated."""
NEEDED = 3
"""Tokens of the longest pass without which there is no answer."""
WHOLE = 1 << 30
"""Bytes of weights up to which all layers are measured."""
LEAST = 128 << 20
"""Bytes of the layers of the smaller part, and half the bytes by which the parts differ: too much
for a processor's cache to hold, so that each pass reads memory as the whole model's passes do."""
SHARE = 5
"""The parts differ by at least one layer in so many of the rest, since extrapolating from two
depths amplifies the noise of their times."""
WORTHWHILE = 0.6


@dataclass(frozen=True)
class PassCosts:
    """Medians in seconds. draft: a draft step over one token, None without a draft. passes: of the
    target, by their number of tokens. start: how much longer the first pass of a round takes, since
    nothing runs yet while its graph is built. step: a plain, pipelined step, 0 where it was not
    timed. replays: rewinding costs the target a pass. samples: the fewest of any figure. spread:
    median distance of the steps from their median, relative to it."""

    draft: float | None
    passes: Mapping[int, float]
    start: float = 0.0
    step: float = 0.0
    replays: bool = False
    samples: int = 1
    spread: float = 0.0

    def in_steps(self, step: float, other: float = 0.0) -> RoundCost:
        """Return the costs in plain steps of `step` seconds. other: seconds of a round besides."""
        return RoundCost(
            draft=(self.draft or 0.0) / step,
            passes={size: seconds / step for size, seconds in self.passes.items()},
            start=(self.start + other) / step,
            replays=self.replays,
        )


@dataclass(eq=False)
class PassTimer:
    """Times passes of a target and its draft. Everything but plain steps is rewound. sizes: tokens
    of the target's passes. draft: the model whose steps run before such a pass, which may be the
    target itself; with None no draft steps are timed, and passes run behind a step of the target.
    steps: time plain steps as well. chain: number of draft steps in a row. The first sample of
    every kind warms up, and counts only until there is another."""

    target: Context
    sizes: Sequence[int] = ()
    draft: Context | None = None
    steps: bool = False
    chain: int = CHAIN
    clock: Clock = time.perf_counter

    def __post_init__(self) -> None:
        kinds: list[Kind] = [("chain", 1)]
        kinds += [("chain", self.chain)] if self.draft is not None and self.chain > 1 else []
        kinds += [("steps", STEPS)] if self.steps else []
        kinds += [("pass", size) for size in self.sizes]
        self._samples: dict[Kind, list[float]] = {kind: [] for kind in kinds}
        self.kinds = tuple(kinds)

    def turn(self, times: int = 1) -> None:
        """Time every kind of pass, `times` over."""
        for kind in self.kinds * times:
            self.time(kind)

    def time(self, kind: Kind) -> None:
        """Add one sample of a kind. The fed tokens do not matter."""
        name, count = kind
        contexts = [context for context in (self.target, self.draft) if context is not None]
        mx.synchronize()
        held = [context.lengths for context in contexts]
        started = self.clock()
        if name == "steps":
            # Each step is submitted before the one before it is read.
            pending = _submit(self.target, mx.array([[1]], dtype=mx.int32), 0)
            for _ in range(count - 1):
                following = _submit(self.target, pending, 0)
                pending.tolist()
                pending = following
            pending.tolist()
        else:
            self._round(count, 0) if name == "chain" else self._round(1, count)
        self._samples[kind].append(self.clock() - started)
        if name != "steps":
            for context, lengths in zip(contexts, held, strict=True):
                context.rewind(lengths)

    def costs(self) -> PassCosts | None:
        """Return the medians of all samples; None before the first turn."""
        used = {kind: s for kind, s in self._samples.items() if s or kind[0] != "pass"}
        if not all(used.values()):
            return None
        alone = used["chain", 1]
        first, draft = _typical(alone), None
        steps, chain = used.get(("steps", STEPS)), used.get(("chain", self.chain), alone)
        if self.draft is not None:
            # Behind another draft step.
            behind = _typical(chain) - first
            draft = first if self.chain == 1 else max(0.0, behind / (self.chain - 1))
        spread = steps or chain
        middle = _typical(spread)
        return PassCosts(
            draft=draft,
            passes={
                n: max(0.0, _typical(s) - first) for (name, n), s in used.items() if name == "pass"
            },
            start=max(0.0, first - draft) if draft is not None else 0.0,
            step=_typical(steps) / STEPS if steps else 0.0,
            replays=self.target.replays,
            samples=min(max(len(samples) - 1, 1) for samples in used.values()),
            spread=_typical([abs(one - middle) for one in spread]) / middle if middle else 0.0,
        )

    def _round(self, drafted: int, size: int) -> None:
        """Take `drafted` single steps, then a pass over `size` tokens, and read its result."""
        chosen = mx.array([[1]], dtype=mx.int32)
        for _ in range(drafted):
            chosen = _submit(self.draft or self.target, chosen, 1)
        if size:
            # From the step before, as a round's drafted tokens are.
            chosen = _submit(self.target, mx.broadcast_to(chosen, (1, size)), size)
        chosen.tolist()


def opened(model: Model, prompt: Sequence[int]) -> Context:
    """Return a context that has read a prompt. Raises PromptError where it cannot."""
    context = model.open(prompt)
    context.advance(mx.array([model.prefix(prompt)], dtype=mx.int32))
    context.evaluate()
    return context


def _submit(context: Context, tokens: mx.array, proposed: int) -> mx.array:
    """Submit a pass, and return the greedy choice after the last of `tokens`, (1, 1), unread."""
    logits = context.advance(tokens, proposed=proposed).logits
    chosen = mx.argmax(logits, axis=-1)[:, -1:]
    mx.async_eval(chosen)
    return chosen


def _typical(samples: Sequence[float]) -> float:
    return median(samples[1:] or samples)


def measure(
    timers: Sequence[PassTimer],
    *,
    turns: int,
    deadline: float,
    clock: Clock = time.perf_counter,
    progress: Progress = ignore_progress,
) -> None:
    """Time every kind of pass once a turn, all models in turns, so that a drift meets all of them.
    turns: after a first one, which warms up. deadline: the clock's time at which measuring ends."""
    kinds = list(dict.fromkeys(kind for timer in timers for kind in timer.kinds))
    total = (turns + 1) * len(kinds)
    for done in range(total):
        if clock() >= deadline:
            break
        progress(done, total)
        kind = kinds[done % len(kinds)]
        for timer in timers:
            if kind in timer.kinds:
                timer.time(kind)
    progress(total, total)


def parts(outline: Outline, whole: int = WHOLE, least: int = LEAST) -> tuple[int, int] | None:
    """Return two depths to measure a model at, or None where it is measured whole. Behind the
    first, irregular layers both have whole repeats of the model's pattern of layers."""
    depth = len(outline.layers)
    if outline.nbytes <= whole or depth < 3:
        return None
    irregular, period = pattern(outline.layers)
    weights = outline.layer_nbytes
    first = _reach(weights, irregular, irregular + period, period, least)
    apart = max(2, -(-(depth - first) // (SHARE * period))) * period
    second = _reach(weights, first, first + apart, period, 2 * least)
    return (first, second) if second <= WORTHWHILE * depth else None


def pattern(layers: Sequence[Hashable]) -> tuple[int, int]:
    """Return (irregular, period): layer i looks like layer i + period for every i >= irregular. It
    is the pair with the smallest sum; without a pattern (0, number of layers)."""
    count = len(layers)
    best = (0, count)
    for period in range(1, count):
        irregular = count - period
        while irregular > 0 and layers[irregular - 1] == layers[irregular - 1 + period]:
            irregular -= 1
        if irregular + period < sum(best):
            best = (irregular, period)
    return best


def extended(few: PassCosts, more: PassCosts, depths: tuple[int, int], depth: int) -> PassCosts:
    """Return the times of `depth` layers, on the lines through those measured at two depths; noise
    may give a line that falls, which is taken to be flat."""
    shallow, deep = depths

    def line(first: float | None, second: float | None) -> float:
        first, second = first or 0.0, second or 0.0
        slope = max(0.0, (second - first) / (deep - shallow))
        return max(first, second) + slope * (depth - deep)

    return PassCosts(
        draft=line(few.draft, more.draft),
        passes={m: line(few.passes[m], s) for m, s in more.passes.items() if m in few.passes},
        start=line(few.start, more.start),
        step=line(few.step, more.step),
        replays=more.replays,
        samples=min(few.samples, more.samples),
        spread=max(few.spread, more.spread),
    )


def _reach(weights: Sequence[int], begin: int, end: int, period: int, least: int) -> int:
    """Return the first of end, end + period, ... at which layers from `begin` on weigh `least`."""
    while end < len(weights) and sum(weights[begin:end]) < least:
        end += period
    return end
