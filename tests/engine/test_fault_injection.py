"""What fails at any boundary of a round hurts nobody else, and leaves nothing wrong behind.

Each case plants one fault at one call: the function raises before it does anything or after it has
done all, or what a model computes is NaN. Whoever is beside it writes the text that its prompt
becomes alone, and so do the same requests afterwards, which begin with what was kept.
"""

import functools
import gc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.decoding.loop import PromptReader
from mlx_specdec.decoding.sequence import Batch, Sequence
from mlx_specdec.decoding.statistics import Recorder, Stopwatch
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.engine import prompt_cache as tree
from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.opening import Opener
from mlx_specdec.engine.pair import Pair, Trial
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.request import Job, Request
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.errors import DAMAGED, DecodingError
from mlx_specdec.interfaces.records import Step
from mlx_specdec.models.distributed.leader import Channel, Follower, Leader, Op, Order, led
from mlx_specdec.models.mlx_lm.context import DecoderOnlyContext
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options
from mlx_specdec.proposers.draft_model import DraftModel
from mlx_specdec.sampling.distribution import Distribution
from mlx_specdec.serve.engine import STOPPING, Engine
from mlx_specdec.text.stream import TextStream
from mlx_specdec.verification.rules import Coupled

from ..support import tiny
from ..support.pairs import PROMPT, decoder_only
from ..support.thread_ranks import ends

OPTIONS = Options(proposer="draft", num_draft=2, cost_cache=False, max_tokens=8, seed=3)
REQUESTS = [
    Request([*PROMPT, 4, 9, 31], replace(OPTIONS, temperature=0.8)),
    Request([*PROMPT, 50, 3], replace(OPTIONS, regular=True, max_tokens=5)),
    Request([*PROMPT, 4, 9, 17, 2], replace(OPTIONS, max_tokens=9)),
    Request([*PROMPT, 11], replace(OPTIONS, temperature=0.8, stop=("7 ",)), top_logprobs=2),
    Request([8, 40, 41], replace(OPTIONS, frequency_penalty=0.5, max_tokens=6)),
]
SECONDS = 60


@dataclass(frozen=True)
class Boundary:
    """A function that fails. single: whether it is about one sequence, which alone may end. at: the
    call that fails, counted from 1. shared: whether ranks do it together. mends: whether nobody
    needs to end."""

    name: str
    owner: Any
    function: str
    single: bool = False
    at: int = 2
    shared: bool = False
    mends: bool = False


BOUNDARIES = [
    Boundary("prepare", Job, "of", single=True),
    Boundary("recall", PromptCache, "beginning", single=True, mends=True),
    Boundary("open", Opener, "open"),
    Boundary("open a context", DecoderOnlyModel, "open_batch"),
    Boundary("begin to draft", DraftModel, "begin"),
    Boundary("read a chunk", PromptReader, "step"),
    Boundary("keep", PromptCache, "keep", single=True),
    Boundary("keep in part", PromptCache, "put", single=True, at=3, mends=True),
    Boundary("split what is kept", tree, "owned", single=True, mends=True),
    Boundary("choose a length", FixedLength, "choose", at=3),
    Boundary("noise", Sequence, "noise", at=4),
    Boundary("propose", DraftModel, "propose"),
    Boundary("cut", Batch, "cut"),
    Boundary("submit", DecoderOnlyContext, "advance", at=3, shared=True),
    Boundary("filter logits", Distribution, "before_filters", at=4),
    Boundary("verify", Coupled, "verify"),
    Boundary("read the verdict", Batch, "commit"),
    Boundary("commit", Sequence, "commit", single=True, at=3),
    Boundary("detokenize", TextStream, "push", single=True, at=3),
    Boundary("logprobs", Batch, "with_logprobs"),
    Boundary("rewind", DecoderOnlyContext, "rewind"),
    Boundary("observe", DraftModel, "observe"),
    Boundary("end a round", Stopwatch, "finish"),
    Boundary("statistics", Recorder, "on_round", single=True, at=3),
    Boundary("trials", Trial, "fails", single=True, at=3),
    Boundary("learn a length", FixedLength, "on_round"),
    Boundary("join", Batch, "join", at=1),
    Boundary("join contexts", DecoderOnlyContext, "join", at=1),
    Boundary("join drafts", DraftModel, "join", at=1),
    Boundary("leave", Batch, "filter", at=1),
    Boundary("leave contexts", DecoderOnlyContext, "filter", at=1),
    Boundary("leave drafts", DraftModel, "filter", at=1),
    Boundary("finish", Job, "report", single=True, at=3),
]
FAULTS = {"before": RuntimeError, "after": MemoryError}


@dataclass
class Ended:
    """What became of one request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    error: str | None = None
    last: bool = False

    def take(self, part: Step) -> None:
        assert not self.last, "nothing follows the end"
        self.tokens += part.tokens
        self.text += part.text
        self.error, self.last = part.error, part.last
        assert part.error is not None or part.result is None or part.result.text == self.text


class World:
    """A pair, what was kept of its prompts, and a way to have requests decoded."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        # Other threads do not compute what this one has begun.
        mx.eval(target().network.parameters(), pair.draft.network.parameters())
        # Found out by passes of its own.
        models = target(), pair.draft
        assert all(model.rows_agree and not model.why_not_batched for model in models)
        self.cache = PromptCache(1 << 24)
        self.raised: BaseException | None = None

    def decode(self) -> list[Ended]:
        """The requests from a list, two at once."""
        ended = [Ended() for _ in REQUESTS]
        run = Scheduler(self.pair, REQUESTS, OPTIONS, BatchSize(2), self.cache)
        try:
            for part in run:
                ended[part.number].take(part)
        except BaseException as problem:
            self.raised = problem
        return ended

    def check_after(self) -> None:
        """Where the same models go on."""

    def close(self) -> None:
        """The end."""


class Served(World):
    """The requests come one by one to an engine in its thread, four at once."""

    def __init__(self, pair: Pair) -> None:
        super().__init__(pair)
        self._begin()

    def open(self, pair: Pair) -> PromptCache:
        """In the place of a store: every engine begins with what the one before it has kept."""
        return self.cache

    def close_cache(self, cache: PromptCache, pair: Pair) -> None:
        """Nothing goes to the disk."""

    def _begin(self) -> None:
        store = type("Store", (), {"open": lambda _, p: self.cache, "close": lambda _, c, p: None})
        self.engine = Engine(lambda: (self.pair, OPTIONS), batch_size=4, waiting=9, store=store())
        loaded = threading.Event()
        self.engine.start(then=loaded.set)
        assert loaded.wait(SECONDS)

    def decode(self) -> list[Ended]:
        if self.engine.problem is not None:
            self._begin()
        ended, heard = [Ended() for _ in REQUESTS], queue.Queue()
        numbers = self.engine.submit(REQUESTS[:2], heard.put)
        while not all(request.last for request in ended):
            part = heard.get(timeout=SECONDS)
            ended[part.number - numbers[0]].take(part)
            if len(numbers) < len(REQUESTS) and (part.tokens or part.last):
                try:
                    numbers += self.engine.submit(REQUESTS[2:], heard.put)
                except RuntimeError:
                    numbers += [-1] * 3
                    for row in ended[2:]:
                        row.error, row.last = STOPPING, True
        until(lambda: not self.engine._pending)
        if any(request.error == STOPPING for request in ended):
            assert self.engine.join(SECONDS)
            assert self.engine.trouble is not None
        self.raised = self.engine.problem
        return ended

    def check_after(self) -> None:
        assert self.engine.trouble is None and self.engine.failures.passes == 0

    def close(self) -> None:
        self.engine.close()
        assert self.engine.join(SECONDS)


class Divided(World):
    """Rank 0 of two, which are threads, each with a whole target of its own."""

    def __init__(self, pair: Pair) -> None:
        _, first, second = ends()
        self._channel, self._leader, self._codes = first, Leader(first), []
        self._follower = Follower(other_target())
        self._thread = threading.Thread(target=self._follow, args=[second], daemon=True)
        self._thread.start()
        super().__init__(replace(pair, target=led(pair.target, self._leader)))

    def _follow(self, channel: Channel) -> None:
        while not self._codes:
            message = channel.receive()
            for order in message.orders:
                if order.op is Op.END:
                    self._codes += order.numbers
                else:
                    self._follower.do(order, message)
        mx.clear_streams()

    def check_after(self) -> None:
        gc.collect()
        self._leader.end(5)
        self._thread.join(SECONDS)
        # Contexts that nobody has any more were given back on both ranks.
        assert self._codes == [5] and not self._follower._contexts

    def close(self) -> None:
        if self._thread.is_alive():
            self._channel.send([Order(Op.END, 0, (1,))])
            self._thread.join(SECONDS)


@functools.cache
def other_target() -> DecoderOnlyModel:
    model = DecoderOnlyModel(tiny.build("llama"))
    mx.eval(model.network.parameters())
    return model


DRIVERS: dict[str, type[World]] = {"list": World, "engine": Served, "ranks": Divided}


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def planted(
    monkeypatch: pytest.MonkeyPatch, boundary: Boundary, when: str, fault: type[BaseException]
) -> Iterator[list[int]]:
    """One call fails; gives the list of how many there were by then."""
    shipped, calls, fired = getattr(boundary.owner, boundary.function), 0, []
    lock = threading.Lock()

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        if boundary.owner is DecoderOnlyContext and arguments[0]._model is not target():
            return shipped(*arguments, **named)
        with lock:
            calls += 1
            now = calls == boundary.at
        if now and when == "before":
            fired.append(calls)
            raise fault("planted")
        result = shipped(*arguments, **named)
        if now:
            fired.append(calls)
            raise fault("planted")
        return result

    with monkeypatch.context() as patch:
        # Bound already: a class method.
        bound = hasattr(shipped, "__self__")
        patch.setattr(boundary.owner, boundary.function, staticmethod(fails) if bound else fails)
        # Whoever keeps what was logged keeps the frames of what has failed.
        logging.disable(logging.CRITICAL)
        yield fired
        logging.disable(logging.NOTSET)


def target() -> DecoderOnlyModel:
    return decoder_only("llama").target


@pytest.fixture(scope="module")
def alone() -> list[tuple[list[int], str]]:
    """What each request becomes by itself, plainly decoded."""
    pair, texts = decoder_only("llama"), []
    for request in REQUESTS:
        result = generate(pair, request.prompt, replace(request.options, regular=True))
        texts.append((list(result.tokens), result.text))
    return texts


def check(ended: list[Ended], alone: list[tuple[list[int], str]]) -> list[int]:
    """Every text is what it is alone, up to where it ended; returns who got an error."""
    for row, (tokens, text) in zip(ended, alone, strict=True):
        if row.last and row.error is None:
            assert (row.tokens, row.text) == (tokens, text)
        if row.error != DAMAGED:  # which is found some tokens later
            assert row.tokens == tokens[: len(row.tokens)]
            assert text.startswith(row.text)
    return [number for number, request in enumerate(ended) if request.error is not None]


def go_through(
    monkeypatch: pytest.MonkeyPatch,
    alone: list[tuple[list[int], str]],
    driver: str,
    boundary: Boundary,
    when: str,
    fault: type[BaseException],
) -> None:
    world = DRIVERS[driver](decoder_only("llama"))
    try:
        with planted(monkeypatch, boundary, when, fault) as fired:
            ended = world.decode()
        assert fired, "the fault was never met"
        errors = check(ended, alone)
        lost = driver == "ranks" and boundary.shared
        if lost or not issubclass(fault, Exception):
            assert isinstance(world.raised, fault)
        else:
            assert world.raised is None and all(request.last for request in ended)
            most = 1 if boundary.single else 2 if driver == "list" else 4
            assert (0 if boundary.mends else 1) <= len(errors) <= most
        if lost:
            assert world.pair.target.lost
            return
        world.raised = None
        assert check(world.decode(), alone) == [] and world.raised is None
        world.check_after()
    finally:
        world.close()


@pytest.mark.parametrize(
    "boundary",
    [
        pytest.param(boundary, id=boundary.name, marks=[pytest.mark.slow] * (number % 2))
        for number, boundary in enumerate(BOUNDARIES)
    ],
)
def test_what_fails_ends_its_own_requests(
    monkeypatch: pytest.MonkeyPatch, alone: list[tuple[list[int], str]], boundary: Boundary
) -> None:
    go_through(monkeypatch, alone, "list", boundary, "before", RuntimeError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "boundary"),
    [
        *(("after", boundary) for boundary in BOUNDARIES),
        *(("before", boundary) for boundary in BOUNDARIES[::3]),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_what_fails_in_a_server_ends_its_own_requests(
    monkeypatch: pytest.MonkeyPatch,
    alone: list[tuple[list[int], str]],
    when: str,
    boundary: Boundary,
) -> None:
    go_through(monkeypatch, alone, "engine", boundary, when, FAULTS[when])


@pytest.mark.slow
@pytest.mark.parametrize(
    "boundary",
    [boundary for boundary in BOUNDARIES if boundary.owner not in (PromptCache, tree)],
    ids=lambda row: row.name,
)
def test_ranks_go_on_unless_they_have_lost_step(
    monkeypatch: pytest.MonkeyPatch, alone: list[tuple[list[int], str]], boundary: Boundary
) -> None:
    go_through(monkeypatch, alone, "ranks", boundary, "after", MemoryError)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "when", "boundary"),
    [
        *(("list", "after", boundary) for boundary in BOUNDARIES),
        *(("engine", "before", boundary) for boundary in BOUNDARIES[::6]),
    ],
    ids=lambda part: getattr(part, "name", part),
)
def test_an_interrupt_is_never_swallowed_and_leaves_nothing_wrong(
    monkeypatch: pytest.MonkeyPatch,
    alone: list[tuple[list[int], str]],
    driver: str,
    when: str,
    boundary: Boundary,
) -> None:
    go_through(monkeypatch, alone, driver, boundary, when, KeyboardInterrupt)


def layer_of(model: DecoderOnlyModel) -> Any:
    """One whose output all later layers keep keys and values of."""
    return model.network.model.layers[0]


@contextmanager
def nan(monkeypatch: pytest.MonkeyPatch, what: str, at: int) -> Iterator[list[int]]:
    """What one pass of a model computes is no number; gives the list of how many there were."""
    calls, fired = 0, []
    of_draft = what.startswith("draft")
    model = decoder_only("llama").draft if of_draft else target()
    inside = what.endswith("states")
    owner = type(layer_of(model)) if inside else DecoderOnlyContext
    name = "__call__" if inside else "advance"
    shipped = getattr(owner, name)

    def damages(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        result = shipped(self, *arguments, **named)
        if (self is not layer_of(model)) if inside else (self._model is not model):
            return result
        calls += 1
        if calls != at:
            return result
        fired.append(calls)
        if inside:
            return result * mx.nan
        rows = mx.arange(result.logits.shape[0])[:, None, None]
        all_rows = "one" not in what
        return replace(result, logits=mx.where((rows == 0) | all_rows, mx.nan, result.logits))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, damages)
        yield fired


@pytest.mark.parametrize("at", [1, pytest.param(2, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize(
    "what", ["one text's logits", "logits", "states", "draft's logits", "draft's states"]
)
def test_what_is_no_number_ends_the_texts_that_are_made_of_it(
    monkeypatch: pytest.MonkeyPatch, alone: list[tuple[list[int], str]], what: str, at: int
) -> None:
    world = World(decoder_only("llama"))
    with nan(monkeypatch, what, at) as fired:
        ended = world.decode()
    assert fired and world.raised is None and all(request.last for request in ended)
    errors = check(ended, alone)
    assert all(ended[number].error == DAMAGED for number in errors)
    assert len(errors) <= (0 if "draft" in what else 1 if "one" in what else 2)
    if at > 2 and "draft" not in what:
        assert errors
    assert check(world.decode(), alone) == []


def test_a_chat_goes_on_clean_after_a_prompt_that_was_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair, cache = decoder_only("llama"), PromptCache(1 << 24)
    prompt = [*PROMPT, 4, 9, 31]
    settings = Options(max_tokens=6, regular=True)
    plain = generate(pair, prompt, settings).tokens
    assert target().rows_agree  # its trial passes come first, and are not damaged
    with nan(monkeypatch, "states", 1) as fired, pytest.raises(DecodingError):
        stream_generate(pair, prompt, settings, cache=cache).result()
    assert fired
    assert stream_generate(pair, prompt, settings, cache=cache).result().tokens == plain
