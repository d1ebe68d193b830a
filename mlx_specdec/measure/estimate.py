"""Estimates what a pair would need and gain on this machine, from configurations alone.

Both models are built with random weights of the right shapes, as far as they fit, and their passes
are timed."""

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
"""Share of the time that the prompt of each model may take."""


@dataclass(frozen=True)
class ModelSource:
    """One model to estimate; see `models.loading.outline`. name: for messages."""

    name: str
    config: Mapping[str, Any]
    dtype: str = "auto"
    q_bits: int | None = None
    expand: bool | None = None

    def outline(self, depth: int | None = None) -> Outline:
        """Return the model's outline, of `depth` layers if that is not None."""
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
        name: A directory, a GGUF file, or a repository of the Hub, of which only config.json is
            downloaded.
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
    """A hidden-state drafter to estimate. files: `drafters.kinds.outline`'s. name: for messages."""

    name: str
    files: DrafterFiles
    dtype: str = "auto"
    q_bits: int | None = None
    expand: bool | None = None


def own_draft(target: ModelSource, name: str, q_bits: int | None = None) -> ModelSource:
    """Return the draft "self" or "self:N", which is the target's layers at `q_bits` a weight. If
    q_bits is None, "self" has SELF_BITS, and N layers are computed with as in the target."""
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
    """What a target lends a drafter, as interfaces.TargetModel has it: that does not depend on how
    many of its layers are built. model: the target once it is built."""

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
    """A drafter on hidden states, as an `Outline` is a model. most: draft tokens in a round."""

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
        self.dtype = "".join(f"{each}-bit, " for each in bits) + dtype_name(self._network.dtype)
        self.layers = self._network.layers
        self.most = int(self._network.most)

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Bytes of the keys and values of a text, and of its source where the target encodes it."""
        columns = generated if self._encodes else prompt + generated
        return self._network.cache_nbytes(prompt, columns)

    def timer(self, model: Base, prompt: int, clock: Clock) -> PassTimer:
        """Return a timer of drafts behind a prompt of so many tokens. model: the target, or a part
        of it with the same embedding and head."""
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
    """Times the drafts of rounds, each of which reads a row of the target's hidden states before.

    reading: of a network, where the rows that were read stay. hidden: (1, 1, taps x target's
    width), the row. most: tokens of the longest draft."""

    def __init__(self, reading: Any, hidden: mx.array, most: int, clock: Clock) -> None:
        super().__init__(reading, draft=reading, chain=min(passes.CHAIN, most), clock=clock)
        self._reading = reading
        self._hidden = hidden

    def time(self, kind: Kind) -> None:
        """Add one sample of a draft of so many tokens."""
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
    announce: Callable[[Estimate], None] = lambda known: None,
    progress: Progress = ignore_progress,
) -> Estimate:
    """Measure both with random weights, if they fit, and predict what the pair gains.

    prompt_tokens, max_tokens: the text that the caches hold; passes are measured behind such a
    prompt. turns: how often everything is measured. seconds: when measuring ends, counted from the
    building of the models. link: between machines such as this one that are to share the target.
    announce: called with the sizes before anything is measured. Raises CheckpointError for a
    configuration of no supported model, and for a drafter that was made for another target;
    PromptError for a prompt that is too long; OptionError for models of different kinds, and for
    settings that do not suit them or MLX here."""
    known = target.outline()
    # The whole model's size decides, also for the layers that are timed in its place.
    target = replace(target, expand=known.expand)
    drafting: Outline | DrafterOutline
    if isinstance(draft, DrafterSource):
        draft.files.check_config(target.config)
        drafting = DrafterOutline(draft, known)
    elif (drafting := draft.outline()).kind != known.kind:
        raise OptionError(
            f"the draft model is {drafting.kind} and the target {known.kind}: give a draft of the "
            "target's own kind"
        )
    else:
        draft = replace(draft, expand=drafting.expand)
    drafter = drafting if isinstance(drafting, DrafterOutline) else None
    text = prompt_tokens, max_tokens
    sides = _side(target.name, known, text), _side(draft.name, drafting, text)
    machines = prediction.cluster(link, known, sides[0].caches_bytes) if link else None
    kind = "draft" if drafter is None else drafter.kind
    needed = Estimate(kind, *sides, *text, usable_memory(), None, machines)
    announce(needed)
    # A target that no single machine holds is measured on a few of its layers.
    whole = sides[0].measured_layers is None
    if not needed.fits or (whole and sum(side.bytes for side in sides) > needed.memory_limit_bytes):
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
            # The larger part, where there are two: what it lends is the whole model's.
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


def _side(name: str, known: Outline | DrafterOutline, text: tuple[int, int]) -> Side:
    return Side(
        name=name,
        dtype=known.dtype,
        vocabulary=known.vocabulary,
        weights_bytes=known.nbytes,
        caches_bytes=known.cache_nbytes(*text),
        layers=len(known.layers),
        measured_layers=passes.parts(known) if isinstance(known, Outline) else None,
    )


def _models(source: ModelSource, side: Side) -> list[Base]:
    """Build the whole model, or two parts of it, where the smaller has the other's weights."""
    if side.measured_layers is None:
        return [source.outline().model()]
    few, more = (source.outline(depth) for depth in side.measured_layers)
    larger = more.model()
    return [few.model(shared=more.weights()), larger]


def _behind(model: Base, tokens: int, until: float, clock: Clock) -> tuple[Context, int]:
    """Return a context behind a prompt of so many tokens, or of as many as shorter prompts promise
    to be read by `until`, and their number."""
    length = 1
    while True:
        started = clock()
        prompt = [7919 * at % model.vocabulary for at in range(1, length + 1)]
        context = passes.opened(model, prompt)
        now = clock()
        each = (now - started) / length
        longer = (n for n in (tokens, min(tokens, 4 * length)) if n > length)
        fitting = next((n for n in longer if now + n * each <= until), None)
        if fitting is None:
            return context, length
        length = fitting


def speeds(target: PassCosts, draft: PassCosts, most: int | None = None) -> Speeds:
    """Predict from the times of a target and a draft. most: tokens of its longest draft."""
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
