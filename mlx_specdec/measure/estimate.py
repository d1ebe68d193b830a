"""Estimates the memory and the speedup of a pair on this machine, from configurations alone.

It builds both models with random weights of the right shapes, with fewer layers if they are large,
and times their passes."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
        return outline(
            self.config,
            self.name,
            dtype=self.dtype,
            q_bits=self.q_bits,
            expand=self.expand,
            depth=depth,
        )


def model_source(
    name: str, revision: str | None, dtype: str, q_bits: int | None, expand: bool | None
) -> ModelSource:
    """Return the model that a name stands for.

    Args:
        name: A directory, a GGUF file, or a repository of the Hub. Only the config.json of a
            repository is downloaded.
        revision: A branch, tag or commit of the Hub; None for main.
        dtype, q_bits, expand: See `NumberFormat`.

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


class Lender:
    """An interfaces.TargetModel for a drafter, which exists before the target is built. The
    attribute `model` is the target, or None until then."""

    def __init__(self, target: Outline, files: DrafterFiles) -> None:
        self.layers = len(target.layers)
        self.vocabulary = target.vocabulary
        self.width = files.target_width
        self.network = target.network
        self.model: Base | None = None

    @property
    def state_dtype(self) -> mx.Dtype:
        return mx.float32 if self.model is None else self.model.state_dtype

    def embed(self, tokens: mx.array) -> mx.array:
        if self.model is None:
            return mx.zeros((*tokens.shape, self.width))
        return self.model.embed(tokens)

    def head(self, states: mx.array) -> mx.array:
        assert self.model is not None, "drafts are timed once there is a target"
        return self.model.head(states)


class DrafterOutline:
    """A hidden-state drafter without weights, with the attributes of an `Outline`. Its attribute
    `most` is the maximum number of draft tokens in a round."""

    def __init__(self, source: DrafterSource, target: Outline) -> None:
        files = source.files
        self.kind = files.kind
        self.vocabulary = files.vocabulary
        self._encodes = target.kind == "encoder-decoder"
        self._lender = Lender(target, files)
        files.check(None, self._lender.layers, self.vocabulary)
        self._network: DrafterNetwork = on_target(files, self._lender)
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

    def timer(self, model: Base, prompt: int, clock: Clock) -> PassTimer:
        """Return a timer of drafts after a prompt.

        Args:
            model: The target, or the first layers of it with its embedding and head.
            prompt: The number of prompt tokens.
            clock: Returns seconds.
        """
        self._lender.model = model
        fill(self._network, 0, {})

        def states(rows: int, width: int) -> mx.array:
            drawn = mx.random.normal((1, rows, width), key=mx.random.key(1))
            return drawn.astype(self._network.dtype)

        reading, rows = self._network.open(), 1 if self._encodes else prompt + 1
        if self._encodes:
            reading.attend(states(prompt, self._lender.width))
        width = sum(map(self._network.width_of, self._network.taps))
        reading.read(states(rows, width), mx.zeros((1, rows), dtype=mx.int32))
        reading.evaluate()
        return DraftTimer(reading, states(1, width), self.most, clock)


class DraftTimer(PassTimer):
    """A timer of the drafts of a hidden-state drafter.

    Before every draft, the drafter reads the target's hidden state of one position, which stays in
    the drafter's cache.
    """

    def __init__(self, reading: Any, hidden: mx.array, most: int, clock: Clock) -> None:
        """Create a timer.

        Args:
            reading: The drafter's network, opened for a sequence.
            hidden: A hidden state, shape (1, 1, number of layers read x width of the target).
            most: The maximum number of draft tokens.
            clock: Returns seconds.
        """
        super().__init__(reading, draft=reading, chain=min(passes.CHAIN, most), clock=clock)
        self._reading = reading
        self._hidden = hidden

    def time(self, kind: Kind) -> None:
        """Add one sample of a draft. The second item of the kind is its number of tokens."""
        reading, (_, count) = self._reading, kind
        mx.synchronize()
        started = self.clock()
        chosen = mx.array([[1]], dtype=mx.int32)
        reading.read(self._hidden, chosen)
        length = reading.length
        for place in range(count):
            logits = reading.guess_after(chosen) if place else reading.guess(count)
            chosen = mx.argmax(logits, axis=-1)[:, -1:]
            mx.async_eval(chosen)
        chosen.tolist()
        self._samples[kind].append(self.clock() - started)
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
        target, draft: The models.
        prompt_tokens: The length of the prompt, after which passes are timed.
        max_tokens: The number of generated tokens that the caches have to hold as well.
        turns: The number of samples of every time.
        seconds: The limit on the time for building the models and measuring.
        clock: Returns seconds.
        link: The network between machines like this one that are to share the target.
        announce: Called with the sizes before anything is measured.
        progress: Called with the numbers of samples that are done and that there are.

    Raises:
        CheckpointError: A configuration is unsupported, or the drafter is for another target.
        PromptError: The prompt is too long.
        OptionError: The models are of different kinds, or the settings do not suit them or MLX.
    """
    sizes = target.outline()
    # The size of the full model decides whether to dequantize the layers that are timed.
    target = replace(target, expand=sizes.expand)
    drafting: Outline | DrafterOutline
    if isinstance(draft, DrafterSource):
        draft.files.check_config(target.config)
        drafting = DrafterOutline(draft, sizes)
    elif (drafting := draft.outline()).kind != sizes.kind:
        raise OptionError(
            f"the draft model is {drafting.kind} and the target {sizes.kind}: give a draft of the "
            "target's own kind"
        )
    else:
        draft = replace(draft, expand=drafting.expand)
    drafter = drafting if isinstance(drafting, DrafterOutline) else None
    text = prompt_tokens, max_tokens
    sides = _side(target.name, sizes, text), _side(draft.name, drafting, text)
    machines = prediction.cluster(link, sizes, sides[0].caches_bytes) if link else None
    kind = "draft" if drafter is None else drafter.kind
    needed = Estimate(kind, *sides, *text, usable_memory(), None, machines)
    announce(needed)
    # A target that only the machines together can hold is measured with a few of its layers.
    has_all_layers = sides[0].measured_layers is None
    if not needed.fits or (
        has_all_layers and sum(side.bytes for side in sides) > needed.memory_limit_bytes
    ):
        return needed
    deadline, share = clock() + seconds, seconds * PROMPTS_SHARE
    try:
        models = _models(target, sides[0])
        timers, lengths = [], []
        for model in models:
            context, length = _behind(model, prompt_tokens, clock() + share, clock)
            timers.append(PassTimer(context, sizes=passes.SIZES, steps=True, clock=clock))
            lengths.append(length)
        if drafter is not None:
            # Every partial model has the embedding and the head of the full model.
            timers.append(drafter.timer(models[-1], prompt_tokens, clock))
        elif isinstance(draft, ModelSource):
            for model in _models(draft, sides[1]):
                context, length = _behind(model, prompt_tokens, clock() + share, clock)
                timers.append(PassTimer(context, draft=context, clock=clock))
                lengths.append(length)
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
    of_target, of_draft = (
        passes.extended(measured.pop(0), measured.pop(0), side.measured_layers, side.layers)
        if side.measured_layers is not None
        else measured.pop(0)
        for side in sides
    )
    alone = speeds(of_target, of_draft, None if drafter is None else drafter.most)
    if machines is not None:
        cost = _cost(of_target, of_draft)
        machines = prediction.with_speeds(machines, cost, alone.step_seconds, alone.predictions)
    return replace(needed, speeds=alone, cluster=machines, read_tokens=min(lengths))


def _side(name: str, sizes: Outline | DrafterOutline, text: tuple[int, int]) -> Side:
    return Side(
        name=name,
        dtype=sizes.dtype,
        vocabulary=sizes.vocabulary,
        weights_bytes=sizes.nbytes,
        caches_bytes=sizes.cache_nbytes(*text),
        layers=len(sizes.layers),
        measured_layers=passes.parts(sizes) if isinstance(sizes, Outline) else None,
    )


def _models(source: ModelSource, side: Side) -> list[Base]:
    """Build the full model, or two partial models that share weights, the smaller one first."""
    if side.measured_layers is None:
        return [source.outline().model()]
    few, more = (source.outline(depth) for depth in side.measured_layers)
    larger = more.model()
    return [few.model(shared=more.weights()), larger]


def _behind(model: Base, tokens: int, until: float, clock: Clock) -> tuple[Context, int]:
    """Prefill a prompt of random tokens, and return its context and its length.

    Args:
        model: The model.
        tokens: The length of the prompt. It is shorter if the time of shorter prompts suggests that
            prefilling would not end in time.
        until: The time on the clock at which prefilling has to end.
        clock: Returns seconds.
    """
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
        passes=tuple(prediction.between(cost.passes, size) for size in range(1, longest + 1)),
        start=cost.start,
        replays=cost.replays,
        samples=min(target.samples, draft.samples),
        spread=max(target.spread, draft.spread),
        predictions=tuple(prediction.best(cost, alpha, drafted) for alpha in prediction.ALPHAS),
    )


def _cost(target: PassCosts, draft: PassCosts) -> RoundCost:
    """Return the costs of a round on one machine."""
    return replace(target, draft=draft.draft, start=draft.start).in_steps(target.step)
