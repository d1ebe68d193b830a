"""Measures the time of passes, which run as in decoding, with a prompt in the KV cache."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import mlx.core as mx

from ..interfaces import Context, Model
from .prediction import RoundCost

Kind = tuple[str, int]
"""What is timed: ("steps", STEPS), ("chain", draft steps) or ("pass", tokens)."""
Clock = Callable[[], float]
"""Returns the seconds since an arbitrary fixed moment."""
STEPS = 8
"""Number of plain steps in a sample. All of them but the first are pipelined, as in decoding."""
CHAIN = 8
"""Number of draft steps in a sample of a chain."""


@dataclass(frozen=True)
class PassCosts:
    """The costs of passes: their median times, in seconds.

    Attributes:
        draft: A draft step over one token; None without a draft.
        start: The additional time of the first pass of a round. No other pass runs while MLX
            builds its graph.
        step: A plain, pipelined step; 0 if it was not timed.
        samples: The smallest number of samples of any of these times.
        spread: The median absolute deviation of the steps, relative to their median.
    """

    draft: float | None
    passes: Mapping[int, float]
    start: float = 0.0
    step: float = 0.0
    samples: int = 1
    spread: float = 0.0

    def in_steps(self, step: float, other: float = 0.0) -> RoundCost:
        """Return the costs in plain steps of `step` seconds, for rounds that spend `other` seconds
        in neither model."""
        return RoundCost(
            draft=(self.draft or 0.0) / step,
            passes={size: seconds / step for size, seconds in self.passes.items()},
            start=(self.start + other) / step,
        )


@dataclass(eq=False)
class PassTimer:
    """A timer of the passes of a target and its draft.

    It rewinds every pass, but not the plain steps. The first sample of every kind is a warm-up,
    which counts only if it is the only one.

    Attributes:
        sizes: The numbers of tokens of the target's passes.
        draft: The context that takes a step before each of these passes; it may be the target's.
            With None, draft steps are not timed, and the target takes that step.
        steps: Whether to time plain steps as well.
        chain: The number of draft steps in a row.
    """

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
        self.samples: dict[Kind, list[float]] = {kind: [] for kind in kinds}

    def turn(self, times: int = 1) -> None:
        """Add `times` samples of every kind."""
        for kind in [*self.samples] * times:
            self.time(kind)

    def time(self, kind: Kind) -> None:
        """Add one sample of a kind. The input tokens are arbitrary."""
        name, count = kind
        contexts = [context for context in (self.target, self.draft) if context is not None]
        mx.synchronize()
        lengths_before = [context.lengths for context in contexts]
        started = self.clock()
        if name == "steps":
            # Submit each step before the result of the step before it is read, as decoding does.
            pending = _submit(self.target, mx.array([[1]], dtype=mx.int32), 0)
            for _ in range(count - 1):
                following = _submit(self.target, pending, 0)
                pending.tolist()
                pending = following
            pending.tolist()
        else:
            self._round(count, 0) if name == "chain" else self._round(1, count)
        self.samples[kind].append(self.clock() - started)
        if name != "steps":
            for context, lengths in zip(contexts, lengths_before, strict=True):
                context.rewind(lengths)

    def costs(self) -> PassCosts | None:
        """Return the median times, or None before the first turn."""
        used = {kind: times for kind, times in self.samples.items() if times or kind[0] != "pass"}
        if not all(used.values()):
            return None
        alone = used["chain", 1]
        first, draft = _typical(alone), None
        steps, chain = used.get(("steps", STEPS)), used.get(("chain", self.chain), alone)
        if self.draft is not None:
            # The first draft step of a round also takes the start-up time.
            later = max(0.0, _typical(chain) - first)
            draft = first if self.chain == 1 else later / (self.chain - 1)
        spread = steps or chain
        middle = _typical(spread)
        deviation = _typical([abs(sample - middle) for sample in spread])
        passes = {size: times for (name, size), times in used.items() if name == "pass"}
        return PassCosts(
            draft=draft,
            passes={size: max(0.0, _typical(times) - first) for size, times in passes.items()},
            start=0.0 if draft is None else max(0.0, first - draft),
            step=_typical(steps) / STEPS if steps else 0.0,
            samples=min(max(len(times) - 1, 1) for times in used.values()),
            spread=deviation / middle if middle else 0.0,
        )

    def _round(self, drafted: int, size: int) -> None:
        """Take `drafted` steps over one token, then a pass over `size` tokens, and await both."""
        chosen = mx.array([[1]], dtype=mx.int32)
        for _ in range(drafted):
            chosen = _submit(self.draft or self.target, chosen, 1)
        if size:
            # The input depends on the step before, as the draft tokens of a round do.
            chosen = _submit(self.target, mx.broadcast_to(chosen, (1, size)), size)
        chosen.tolist()


def opened(model: Model, prompt: Sequence[int]) -> Context:
    """Prefill a prompt and return its context. Raises PromptError if the prompt is unusable."""
    context = model.open(prompt)
    context.advance(mx.array([model.prefix(prompt)], dtype=mx.int32))
    context.evaluate()
    return context


def _submit(context: Context, tokens: mx.array, proposed: int) -> mx.array:
    """Start a pass asynchronously, and return its greedy next token, shape (1, 1)."""
    logits = context.advance(tokens, proposed=proposed).logits
    chosen = mx.argmax(logits, axis=-1)[:, -1:]
    mx.async_eval(chosen)
    return chosen


def _typical(samples: Sequence[float]) -> float:
    return median(samples[1:] or samples)
