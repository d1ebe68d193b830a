"""Two configurations -> what their pair would need and gain on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..contracts import Model, Progress
from ..costs.passes import Clock, PassCosts, PassTimer, opened
from ..costs.speedup import RoundCost, between, speedups
from ..errors import OptionError, SpecdecError, first_line
from ..models.outline import Outline, outline
from ..options import SELF
from ..pair import SELF_BITS
from .depths import extrapolate, parts
from .measure import FIRST_SIZES, SIZES_BETWEEN, measure
from .memory import limit
from .result import Estimate, Prediction, Side, Speeds

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True)
class Asked:
    """One model as it was asked for; see `models.outline.outline`. name: for messages."""

    name: str
    config: Mapping[str, Any]
    dtype: str = "auto"
    q_bits: int | None = None
    q_group_size: int = 64

    def outline(self, depth: int | None = None) -> Outline:
        """Its outline, of `depth` layers where given."""
        return outline(
            self.config,
            self.name,
            dtype=self.dtype,
            q_bits=self.q_bits,
            q_group_size=self.q_group_size,
            depth=depth,
        )


def own_draft(target: Asked, q_bits: int | None = None) -> Asked:
    """The draft "self": the target's own layers at q_bits a weight."""
    config = {k: v for k, v in target.config.items() if not k.startswith("quantization")}
    return Asked(SELF, config, target.dtype, q_bits or SELF_BITS)


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure. prompt, generated: tokens of the text that the caches are for;
    passes are measured behind such a prompt. turns: how often everything is measured. seconds: in
    which as much is measured as fits, building the models included, and at least what an answer
    needs."""

    prompt: int = 128
    generated: int = 128
    turns: int = 9
    seconds: float = 60.0

    def __post_init__(self) -> None:
        for name, value in (
            ("prompt-tokens", self.prompt),
            ("max-tokens", self.generated),
            ("turns", self.turns),
        ):
            if value < 1:
                raise OptionError(f"{name} must be 1 or more, not {value}")


def estimate(
    target: Asked,
    draft: Asked,
    effort: Effort | None = None,
    *,
    clock: Clock = time.perf_counter,
    cut: Callable[[Outline], tuple[int, int] | None] = parts,
    memory_limit: Callable[[], int] = limit,
    progress: Progress | None = None,
) -> Estimate:
    """Measure both models with random weights, if they fit, and predict.

    cut: at which two depths a model is measured. memory_limit: bytes.

    Raises CheckpointError for a configuration of no supported model; PromptError for a prompt that
    is too long for it; OptionError for models of different kinds, and for settings that do not suit
    them or MLX here.
    """
    effort = effort or Effort()
    known = target.outline(), draft.outline()
    if known[0].kind != known[1].kind:
        raise OptionError(
            f"the draft model is {known[1].kind} and the target {known[0].kind}: give a draft of "
            "the target's own kind"
        )
    needed = Estimate(
        target=_side(target.name, known[0], effort, cut(known[0])),
        draft=_side(draft.name, known[1], effort, cut(known[1])),
        prompt_tokens=effort.prompt,
        max_tokens=effort.generated,
        memory_limit_bytes=memory_limit(),
        speeds=None,
    )
    if not needed.fits:
        return needed
    sides = ((target, needed.target), (draft, needed.draft))
    try:
        of_target, of_draft = _measured(sides, effort, clock, progress)
    except SpecdecError:
        raise
    except (RuntimeError, ValueError) as problem:
        raise OptionError(
            f"MLX cannot run these models as asked for on this device: {first_line(problem)}"
        ) from problem
    return replace(needed, speeds=speeds(of_target, of_draft))


def speeds(target: PassCosts, draft: PassCosts) -> Speeds:
    """What the times of a target and a draft promise."""
    cost = replace(target, draft=draft.draft, start=draft.start).in_steps(target.step)
    longest = max(cost.passes)
    return Speeds(
        step_seconds=target.step,
        draft_seconds=draft.draft or 0.0,
        draft_cost=cost.draft,
        passes=tuple(between(cost.passes, size) for size in range(1, longest + 1)),
        start=cost.start,
        replays=cost.replays,
        samples=min(target.samples, draft.samples),
        spread=max(target.spread, draft.spread),
        predictions=tuple(best(cost, alpha, longest - 1) for alpha in ALPHAS),
    )


def best(cost: RoundCost, alpha: float, longest: int) -> Prediction:
    """The length up to `longest` with the highest speedup, 0 where no length gains."""
    gains = speedups(cost, [alpha**place for place in range(1, longest + 1)])
    chosen = max(range(len(gains)), key=gains.__getitem__)
    return Prediction(alpha, chosen, gains[chosen])


def extended(few: PassCosts, more: PassCosts, depths: tuple[int, int], depth: int) -> PassCosts:
    """Times of `depth` layers from those measured at two depths; see `depths.extrapolate`."""

    def line(first: float | None, second: float | None) -> float:
        return extrapolate(first or 0.0, second or 0.0, depths, depth)

    return PassCosts(
        draft=line(few.draft, more.draft),
        passes={m: line(few.passes[m], s) for m, s in more.passes.items() if m in few.passes},
        start=line(few.start, more.start),
        step=line(few.step, more.step),
        replays=more.replays,
        samples=min(few.samples, more.samples),
        spread=max(few.spread, more.spread),
    )


def _side(name: str, known: Outline, effort: Effort, depths: tuple[int, int] | None) -> Side:
    return Side(
        name=name,
        dtype=known.dtype,
        vocabulary=known.vocabulary,
        weights_bytes=known.nbytes,
        caches_bytes=known.cache_nbytes(effort.prompt, effort.generated),
        layers=len(known.layers),
        measured_layers=depths,
    )


def _measured(
    sides: Sequence[tuple[Asked, Side]], effort: Effort, clock: Clock, progress: Progress | None
) -> list[PassCosts]:
    """Times of all layers of the target, and of the draft."""
    deadline = clock() + effort.seconds
    groups: list[list[PassTimer]] = []
    for asked, side in sides:
        contexts = []
        for model in _models(asked, side):
            prompt = [7919 * place % model.vocabulary for place in range(1, effort.prompt + 1)]
            contexts.append(opened(model, prompt))
        groups.append(
            [PassTimer(context, draft=context, clock=clock) for context in contexts]
            if groups
            else [
                PassTimer(
                    context, sizes=FIRST_SIZES, between=SIZES_BETWEEN, steps=True, clock=clock
                )
                for context in contexts
            ]
        )
    timers = [timer for group in groups for timer in group]
    measure(timers, turns=effort.turns, deadline=deadline, clock=clock, progress=progress)
    results = []
    for group, (_, side) in zip(groups, sides, strict=True):
        first, *more = [costs for timer in group if (costs := timer.costs()) is not None]
        if side.measured_layers is not None:
            first = extended(first, more[0], side.measured_layers, side.layers)
        results.append(first)
    return results


def _models(asked: Asked, side: Side) -> Iterator[Model]:
    """The whole model, or its two parts, of which the smaller one shares the other's weights."""
    if side.measured_layers is None:
        yield asked.outline().model()
        return
    few, more = (asked.outline(depth) for depth in side.measured_layers)
    larger = more.model()
    yield few.model(given=more.weights())
    yield larger
