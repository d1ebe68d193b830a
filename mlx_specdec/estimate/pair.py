"""Two configurations -> what their pair would need and gain on this machine.

Knows outlines, probes and the arithmetic, and in which order they are asked. Knows no files, no
terminal and no text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..contracts import Model, Progress
from ..errors import OptionError, SpecdecError
from ..models.outline import Outline, outline
from .arithmetic import ALPHAS, Costs, best, between, extrapolate
from .depths import parts
from .measure import SIZES, Clock, Probe, Timings, Wanted, measure
from .memory import limit
from .result import Estimate, Side, Speeds

MOST_DRAFTED = 16
OF_TARGET = Wanted(steps=True, sizes=SIZES)
OF_DRAFT = Wanted(drafts=True)


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


@dataclass(frozen=True)
class Effort:
    """How thoroughly to measure. prompt, generated: tokens of the text that the caches are for;
    passes are measured behind such a prompt. turns, seconds: as `measure.measure` has them."""

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
    sides = (needed.target, needed.draft)
    try:
        of_target, of_draft = _measured((target, draft), sides, effort, clock, progress)
    except SpecdecError:
        raise
    except (RuntimeError, ValueError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise OptionError(
            f"MLX cannot run these models as asked for on this device: {reason}"
        ) from problem
    return replace(needed, speeds=speeds(of_target, of_draft))


def speeds(target: Timings, draft: Timings) -> Speeds:
    """What the times of a target and a draft promise."""
    passes = between(target.passes, MOST_DRAFTED + 1)
    costs = Costs(
        draft=draft.draft / target.step,
        passes=tuple(seconds / target.step for seconds in passes),
        start=draft.start / target.step,
        replays=target.replays,
    )
    return Speeds(
        step_seconds=target.step,
        draft_seconds=draft.draft,
        draft_cost=costs.draft,
        passes=costs.passes,
        start=costs.start,
        replays=costs.replays,
        spread=max(target.spread, draft.spread),
        predictions=tuple(best(costs, alpha) for alpha in ALPHAS),
    )


def extended(few: Timings, more: Timings, depths: tuple[int, int], depth: int) -> Timings:
    """Times of `depth` layers from those measured at two depths; see `arithmetic.extrapolate`."""
    return Timings(
        step=extrapolate(few.step, more.step, depths, depth),
        draft=extrapolate(few.draft, more.draft, depths, depth),
        passes={
            size: extrapolate(few.passes[size], seconds, depths, depth)
            for size, seconds in more.passes.items()
        },
        start=extrapolate(few.start, more.start, depths, depth),
        replays=more.replays,
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
    pair: Sequence[Asked],
    sides: Sequence[Side],
    effort: Effort,
    clock: Clock,
    progress: Progress | None,
) -> list[Timings]:
    """Times of all layers of each model."""
    probes = [
        [Probe(model, effort.prompt, wanted, clock) for model in _models(asked, side)]
        for asked, side, wanted in zip(pair, sides, (OF_TARGET, OF_DRAFT), strict=True)
    ]
    everything = [probe for group in probes for probe in group]
    measure(everything, turns=effort.turns, seconds=effort.seconds, clock=clock, progress=progress)
    results = []
    for group, side in zip(probes, sides, strict=True):
        first = group[0].timings()
        if side.measured_layers is None:
            results.append(first)
        else:
            more = group[1].timings()
            results.append(extended(first, more, side.measured_layers, side.layers))
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
