"""Estimates the memory and the speedup of a pair on this machine, from configurations alone.

It builds both models with random weights of the right shapes, with fewer layers if they are large,
and times their passes."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from ..checkpoints.disk import usable_memory
from ..checkpoints.files import described
from ..checkpoints.source import resolve_config
from ..checkpoints.tensors import dtype_name
from ..engine.loading import SELF_BITS
from ..errors import OptionError, SpecdecError, first_line
from ..interfaces import Context, Progress, ignore_progress
from ..models import families
from ..models.base import Base
from ..models.drafters.files import DrafterFiles
from ..models.drafters.kinds import on_target
from ..models.drafters.network import DrafterNetwork
from ..models.loading import outline
from ..models.number_format import NumberFormat
from ..models.outline import Outline, fill
from ..options import own_layers
from . import passes, prediction
from .passes import Clock, Kind, PassCosts, PassTimer
from .prediction import Estimate, Link, RoundCost, Side, Speeds

PROMPTS_SHARE = 0.1
"""Share of the measuring time within which the prompt of each model has to be prefilled."""


@dataclass(frozen=True)
class ModelSource:
    """A model to estimate, described by its config.json; see `models.loading.outline`. Messages use
    the name."""

    name: str
    config: Mapping[str, Any]
    dtype: str = "auto"
    q_bits: int | None = None
    expand: bool | None = None

    def outline(self, depth: int | None = None) -> Outline:
        """Return the model's outline, with `depth` layers if that is not None."""
        numbers = {"dtype": self.dtype, "q_bits": self.q_bits, "expand": self.expand}
        return outline(self.config, self.name, **numbers, depth=depth)  # type: ignore[arg-type]

    def as_draft(self, target: "SizedModel") -> "SizedModel":
        """Return the draft model for a target. Raises OptionError if it is of another kind."""
        draft, kind = SizedModel(self), target.outline.kind
        if draft.outline.kind != kind:
            raise OptionError(
                f"the draft model is {draft.outline.kind} and the target {kind}: give a draft of "
                "the target's own kind"
            )
        return draft


def model_source(
    name: str, revision: str | None, dtype: str, q_bits: int | None, expand: bool | None
) -> ModelSource:
    """Return a model by its name: a directory, a GGUF file, or a repository of the Hub. Only the
    config.json of a repository is downloaded. `NumberFormat` explains the numbers.

    Raises:
        SourceError: There is no such model.
        CheckpointError: The configuration is missing or damaged.
    """
    config = described(resolve_config(name, revision=revision))
    return ModelSource(name, config, dtype, q_bits, expand)


@dataclass(frozen=True)
class DrafterSource:
    """A hidden-state drafter to estimate, with the files that `drafters.kinds.outline` returns."""

    name: str
    files: DrafterFiles
    dtype: str = "auto"
    q_bits: int | None = None
    expand: bool | None = None

    def as_draft(self, target: "SizedModel") -> "DrafterOutline":
        """Return the drafter for a target. Raises CheckpointError if it is for another target."""
        self.files.check_config(target.source.config)
        return DrafterOutline(self, target.outline)


def own_draft(target: ModelSource, name: str, q_bits: int | None = None) -> ModelSource:
    """Return the draft "self" or "self:N", which has the target's layers at `q_bits` bits. If
    `q_bits` is None, "self" has SELF_BITS, and "self:N" has the target's own weights."""
    layers = own_layers(name) or 0
    config: Mapping[str, Any] = target.config
    if layers and q_bits is None:
        target = replace(target, expand=target.outline().expand)
    else:
        config = {k: v for k, v in config.items() if not k.startswith("quantization")}
        target = replace(target, q_bits=q_bits or SELF_BITS)
    if layers:
        config = families.of_config(config).with_layers(config, range(layers))
    return replace(target, name=name, config=config)


Prefill = Callable[[Base], Context]
"""Returns a model's context after the prompt."""


class SizedModel:
    """A model without weights. It is timed with all layers, or at two depths.

    Attributes:
        most: The maximum number of draft tokens in a round; None if there is none.
    """

    proposer = "draft"
    most: int | None = None

    def __init__(self, source: ModelSource) -> None:
        self.outline = source.outline()
        # The size of the full model decides whether to dequantize the layers that are timed.
        self.source = replace(source, expand=self.outline.expand)
        self.measured_layers = passes.parts(self.outline)

    def models(self) -> list[Base]:
        """Build the full model, or two partial models that share weights, the smaller one first."""
        if self.measured_layers is None:
            return [self.source.outline().model()]
        few, more = map(self.source.outline, self.measured_layers)
        larger = more.model()
        return [few.model(shared=more.weights()), larger]

    def timers(
        self, target: Base, prompt: int, prefill: Prefill, clock: Clock
    ) -> Iterator[PassTimer]:
        """Yield timers of the drafts after a prompt."""
        for model in self.models():
            context = prefill(model)
            yield PassTimer(context, draft=context, clock=clock)

    def full(self, measured: Iterator[PassCosts]) -> PassCosts:
        """Return the costs of the full model from the next one or two costs."""
        first = next(measured)
        if self.measured_layers is None:
            return first
        depth = len(self.outline.layers)
        return passes.extended(first, next(measured), self.measured_layers, depth)


class DrafterOutline:
    """A hidden-state drafter without weights, with the methods of a `SizedModel` and the attributes
    of an `Outline`."""

    measured_layers = None

    def __init__(self, source: DrafterSource, target: Outline) -> None:
        files = source.files
        self.outline = self
        self.source = source
        self.proposer = files.kind
        self.vocabulary = files.vocabulary
        self._encodes = target.kind == "encoder-decoder"
        # The drafter exists before the target is built, whose embedding suffices for its shapes.
        self._target = SimpleNamespace(
            layers=len(target.layers),
            vocabulary=target.vocabulary,
            width=files.target_width,
            network=target.network,
            state_dtype=mx.float32,
            embed=lambda tokens: mx.zeros((*tokens.shape, files.target_width)),
        )
        files.check(None, self._target.layers, self.vocabulary)
        self._network: DrafterNetwork = on_target(files, self._target)
        numbers = NumberFormat(source.dtype, source.q_bits, expand=source.expand)
        self._network.take(files, numbers, values=False)
        self.nbytes = self._network.nbytes
        bits = {module.bits for module in self._network.modules() if hasattr(module, "bits")}
        self.dtype = "".join(f"{width}-bit, " for width in bits) + dtype_name(self._network.dtype)
        self.layers = self._network.layers
        self.most = int(self._network.most)

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Return the bytes of the keys and values of a sequence, an encoded prompt included."""
        columns = generated if self._encodes else prompt + generated
        return self._network.cache_nbytes(prompt, columns)

    def timers(
        self, target: Base, prompt: int, prefill: Prefill, clock: Clock
    ) -> Iterator[PassTimer]:
        """Yield a timer of drafts after a prompt. A partial target suffices, since it has the
        embedding and the head of the full model."""
        parts = {"embed": target.embed, "head": target.head, "state_dtype": target.state_dtype}
        vars(self._target).update(parts)
        fill(self._network, 0, {})

        def states(rows: int, width: int) -> mx.array:
            drawn = mx.random.normal((1, rows, width), key=mx.random.key(1))
            return drawn.astype(self._network.dtype)

        reading: Any = self._network.open()
        rows = 1 if self._encodes else prompt + 1
        if self._encodes:
            reading.attend(states(prompt, self._target.width))
        width = sum(map(self._network.width_of, self._network.taps))
        reading.read(states(rows, width), mx.zeros((1, rows), dtype=mx.int32))
        reading.evaluate()
        chain = min(passes.CHAIN, self.most)
        yield DraftTimer(reading, draft=reading, chain=chain, clock=clock, hidden=states(1, width))

    def full(self, measured: Iterator[PassCosts]) -> PassCosts:
        """Return the next costs, since the drafter was measured as it is."""
        return next(measured)


@dataclass(eq=False)
class DraftTimer(PassTimer):
    """A timer of the drafts of a hidden-state drafter, whose network is the target and the draft.
    Before every draft, the drafter reads `hidden`, the target's states of one position, shape (1,
    1, number of layers read x width), which stay in its cache."""

    target: Any
    hidden: mx.array | None = None

    def time(self, kind: Kind) -> None:
        """Add one sample of a draft. The second item of the kind is its number of tokens."""
        reading, (_, count) = self.target, kind
        mx.synchronize()
        started = self.clock()
        chosen = mx.array([[1]], dtype=mx.int32)
        reading.read(self.hidden, chosen)
        length = reading.length
        for place in range(count):
            logits = reading.guess_after(chosen) if place else reading.guess(count)
            chosen = mx.argmax(logits, axis=-1)[:, -1:]
            mx.async_eval(chosen)
        chosen.tolist()
        self.samples[kind].append(self.clock() - started)
        reading.rewind((length,))


def estimate(
    target: ModelSource,
    draft: ModelSource | DrafterSource,
    *,
    prompt_tokens: int = 128,
    max_tokens: int = 128,
    turns: int = 9,
    seconds: float = 60.0,
    clock: Clock = time.perf_counter,
    link: Link | None = None,
    announce: Callable[[Estimate], None] = lambda sizes: None,
    progress: Progress = ignore_progress,
) -> Estimate:
    """Time both models with random weights, if they fit, and predict the speedup of the pair.

    Args:
        prompt_tokens: The length of the prompt, after which passes are timed.
        max_tokens: The number of generated tokens that the caches have to hold as well.
        turns: The number of samples of every time.
        seconds: The limit on the time for building the models and measuring.
        link: The network between machines like this one that are to share the target.
        announce: Called with the sizes before anything is measured.

    Raises:
        CheckpointError: A configuration is unsupported, or the drafter is for another target.
        PromptError: The prompt is too long.
        OptionError: The models are of different kinds, or the settings do not suit them or MLX.
    """
    sized = SizedModel(target)
    drafted = draft.as_draft(sized)
    text = prompt_tokens, max_tokens
    sides = _side(sized, *text), _side(drafted, *text)
    machines = prediction.cluster(link, sized.outline, sides[0].caches_bytes) if link else None
    needed = Estimate(drafted.proposer, *sides, *text, usable_memory(), None, machines)
    announce(needed)
    alone = sum(side.bytes for side in sides)
    # A target that only the machines together can hold is measured with a few of its layers.
    too_large = sized.measured_layers is None and alone > needed.memory_limit_bytes
    if too_large or not needed.fits:
        return needed
    deadline, share = clock() + seconds, seconds * PROMPTS_SHARE
    lengths = []

    def prefill(model: Base) -> Context:
        context, length = _prefilled(model, prompt_tokens, clock() + share, clock)
        lengths.append(length)
        return context

    try:
        models = sized.models()
        timers = [
            PassTimer(prefill(model), sizes=passes.SIZES, steps=True, clock=clock)
            for model in models
        ]
        timers += drafted.timers(models[-1], prompt_tokens, prefill, clock)
        passes.measure(timers, turns=turns, deadline=deadline, clock=clock, progress=progress)
    except SpecdecError:
        raise
    except (RuntimeError, ValueError) as problem:
        raise OptionError(
            f"MLX cannot run these models as asked for on this device: {first_line(problem)}"
        ) from problem
    measured = [costs for timer in timers if (costs := timer.costs()) is not None]
    longest = [max(costs.passes, default=0) for costs in measured if costs.step]
    if len(measured) < len(timers) or min(longest) < passes.NEEDED:
        return replace(needed, late=True)
    rest = iter(measured)
    of_target, of_draft = sized.full(rest), drafted.full(rest)
    found = speeds(of_target, of_draft, drafted.most)
    if machines is not None:
        cost = _cost(of_target, of_draft)
        machines = prediction.with_speeds(machines, cost, found.step_seconds, found.predictions)
    return replace(needed, speeds=found, cluster=machines, read_tokens=min(lengths))


def _side(model: SizedModel | DrafterOutline, prompt_tokens: int, max_tokens: int) -> Side:
    sizes = model.outline
    return Side(
        name=model.source.name,
        dtype=sizes.dtype,
        vocabulary=sizes.vocabulary,
        weights_bytes=sizes.nbytes,
        caches_bytes=sizes.cache_nbytes(prompt_tokens, max_tokens),
        layers=len(sizes.layers),
        measured_layers=model.measured_layers,
    )


def _prefilled(model: Base, tokens: int, until: float, clock: Clock) -> tuple[Context, int]:
    """Prefill a prompt of `tokens` random tokens, and return its context and its length. It is
    shorter if the time of shorter prompts suggests that prefilling would not end at the time
    `until`."""
    length = 1
    while True:
        started = clock()
        prompt = [7919 * at % model.vocabulary for at in range(1, length + 1)]
        context = passes.opened(model, prompt)
        now = clock()
        seconds_per_token = (now - started) / length
        longer = (n for n in (tokens, min(tokens, 4 * length)) if n > length)
        fitting = next((n for n in longer if now + n * seconds_per_token <= until), None)
        if fitting is None:
            return context, length
        length = fitting


def speeds(target: PassCosts, draft: PassCosts, most: int | None = None) -> Speeds:
    """Predict speedups from the times of a target and a draft of at most `most` tokens."""
    cost = _cost(target, draft)
    longest = max(cost.passes)
    drafted = longest - 1 if most is None else min(most, longest - 1)
    return Speeds(
        step_seconds=target.step,
        draft_seconds=draft.draft or 0.0,
        draft_cost=cost.draft,
        passes=tuple(map(cost.pass_over, range(1, longest + 1))),
        start=cost.start,
        samples=min(target.samples, draft.samples),
        spread=max(target.spread, draft.spread),
        predictions=tuple(prediction.best(cost, alpha, drafted) for alpha in prediction.ALPHAS),
    )


def _cost(target: PassCosts, draft: PassCosts) -> RoundCost:
    """Return the costs of a round on one machine."""
    return replace(target, draft=draft.draft, start=draft.start).in_steps(target.step)
