"""One thread that owns the models and steps the decoding. Others hand it requests, and hear.

Knows no HTTP. A request joins and leaves between rounds; nothing outside the thread touches an
array.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import process as threads
from ..decoding.stop_criteria import Emission
from ..engine.jobs import Failures
from ..engine.many import ManyRun, Part, Request
from ..engine.memory import FixedBatchSize, MemoryBudget
from ..engine.pair import Pair
from ..engine.prompt_cache import PromptCache
from ..engine.prompt_cache_files import Store
from ..errors import SpecdecError
from ..options import Options
from .metrics import Metrics

Listener = Callable[[Part], None]
"""Called in the engine's thread with every part of a request; it must return at once."""
STOPPING = "the server is shutting down"
FAILED_PASSES = 3
"""Number of failed passes in a row, without a token in between, that make /health report 503."""
STEP_SECONDS = 300.0
"""Seconds after which an unfinished step is assumed to hang."""
log = logging.getLogger(__name__)


class QueueFull(Exception):
    """No more requests can wait."""


@dataclass
class _Caller:
    """Who hears of a request. came, heard: when it came, and when its newest tokens did."""

    listener: Listener
    came: float
    heard: float | None = None


class Engine:
    """Decodes requests until it is closed.

    load: called in the thread, gives the models and the options that requests begin with.
    batch_size: how many are decoded at once. waiting: how many more may wait. store: of what was
    computed of prompts; None keeps nothing. memory_budget: as ManyRun has it.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Pair, Options]],
        *,
        batch_size: int,
        waiting: int,
        store: Store | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.metrics = Metrics()
        self.ready = threading.Event()
        self.problem: BaseException | None = None
        self.batch_size = batch_size
        self._load = load
        self._store = store
        self._memory_budget = memory_budget
        self.reserved_bytes = 0
        self._budget: MemoryBudget | None = None
        self._cache: PromptCache | None = None
        self._most = batch_size + waiting
        self._loaded: tuple[Pair, Options] | None = None
        self._changed = threading.Condition()
        self._callers: dict[int, _Caller] = {}
        self._arrived: list[tuple[int, Request]] = []
        self._left: list[int] = []
        self._numbers = 0
        self._waiting = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failures = Failures()
        self._stepped = 0.0

    @property
    def pair(self) -> Pair:
        """What is served, once it is loaded."""
        assert self._loaded is not None, "the engine is loading"
        return self._loaded[0]

    @property
    def options(self) -> Options:
        """What a request has not said for itself."""
        assert self._loaded is not None, "the engine is loading"
        return self._loaded[1]

    @property
    def cached_bytes(self) -> int:
        """Size of what is kept of prompts."""
        return 0 if self._cache is None else self._cache.nbytes

    @property
    def budget(self) -> MemoryBudget:
        """What requests may take of memory, once the models are loaded."""
        assert self._budget is not None, "the engine is loading"
        return self._budget

    @property
    def requests(self) -> tuple[int, int]:
        """How many requests are decoded or read now, and how many wait."""
        with self._changed:
            waiting = self._waiting + len(self._arrived)
            return max(0, len(self._callers) - waiting), waiting

    @property
    def trouble(self) -> str | None:
        """The reason why texts make no progress; None when they do, or when there are no requests.
        To be read once the engine has loaded."""
        if self.problem is not None or self._thread is None or not self._thread.is_alive():
            return "the engine has ended"
        if self.failures.passes >= FAILED_PASSES:
            return f"{self.failures.passes} passes have failed one after the other"
        with self._changed:
            came = min((each.came for each in self._callers.values()), default=None)
        if came is not None and time.perf_counter() - max(came, self._stepped) > STEP_SECONDS:
            return f"a step has not finished in {STEP_SECONDS:.0f} seconds"
        return None

    def start(self, then: Callable[[], None] = lambda: None) -> None:
        """Load, then decode. then: called in the thread once it is loaded, and where `problem` is
        set, which ends it."""
        self._thread = threading.Thread(target=self._work, args=[then], name="engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request], listener: Listener) -> list[int]:
        """Take all of these requests, or none; returns their numbers. Raises QueueFull, or
        RuntimeError once the engine is closed."""
        with self._changed:
            if self._closed:
                raise RuntimeError(STOPPING)
            if len(self._callers) + len(requests) > self._most:
                self.metrics.count("rejected", len(requests))
                raise QueueFull
            first, self._numbers = self._numbers, self._numbers + len(requests)
            numbers = list(range(first, self._numbers))
            self._arrived += zip(numbers, requests, strict=True)
            came = time.perf_counter()
            self._callers.update({number: _Caller(listener, came) for number in numbers})
            self._changed.notify()
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Give up requests; those that have ended are none any more."""
        with self._changed:
            known = [each for each in numbers if self._callers.pop(each, None) is not None]
            self._left += known
            self._changed.notify()
        self.metrics.count("cancelled", len(known))

    def close(self) -> None:
        """Take no more requests and end those that are here with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread; whether it has ended."""
        assert self._thread is not None, "the engine was not started"
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self, then: Callable[[], None]) -> None:
        threads.clear_at_end()
        try:
            self._loaded = self._load()
            if self._store is not None:
                self._cache = self._store.open(self.pair)
            many = self._begin()
            self.ready.set()
            then()
            self._decode(many)
        except BaseException as problem:
            # Told by whoever started the engine.
            self.problem = problem
            self.close()
            then()
        self._tell(self._all_with(STOPPING))
        self._keep_cache()

    def _decode(self, many: ManyRun) -> None:
        """Until the engine is closed. Where a step fails as a whole, the requests that are here end
        and the next ones begin with nothing; ranks that have lost step end with the process."""
        while (taken := self._take(wait=many.idle)) is not None:
            try:
                parts = self._step(many, *taken)
            except Exception as problem:
                if getattr(self.pair.target, "lost", False):
                    raise
                log.exception("a step of the engine failed")
                self.failures.passes += 1
                many, parts = self._begin(), self._all_with(self.failures.note(problem))
            self._stepped = time.perf_counter()
            self._tell(parts)
        many.keep()

    def _keep_cache(self) -> None:
        if self._store is None or self._cache is None:
            return
        try:
            self._store.close(self._cache, self.pair)
        except SpecdecError as problem:
            log.error("%s", problem)

    def _begin(self) -> ManyRun:
        self._waiting = 0
        size = FixedBatchSize(self.batch_size)
        budget, failures = self._memory_budget, self.failures
        many = ManyRun(self.pair, None, self.options, size, self._cache, failures, budget)
        self._budget, self.reserved_bytes = many.budget, 0
        return many

    def _take(self, *, wait: bool) -> tuple[list[tuple[int, Request]], list[int]] | None:
        """Who has arrived and who has left since the last time; None when all is over."""
        with self._changed:
            while wait and not (self._arrived or self._left or self._closed):
                self._changed.wait()
            if self._closed:
                return None
            taken = self._arrived, self._left
            self._arrived, self._left = [], []
            return taken

    def _step(
        self, many: ManyRun, arrived: Sequence[tuple[int, Request]], left: Sequence[int]
    ) -> list[Part]:
        for number, request in arrived:
            many.add(number, request)
        for number in left:
            many.cancel(number)
        parts = many.step()
        if arrived or left or many.waiting != self._waiting or any(part.last for part in parts):
            self.reserved_bytes = many.reserved_bytes
        self._waiting = many.waiting
        self.metrics.count("steps")
        return parts

    def _all_with(self, error: str) -> list[Part]:
        """The end of all requests."""
        with self._changed:
            self._arrived = []
            return [Part(number, Emission((), ()), error=error) for number in self._callers]

    def _tell(self, parts: Sequence[Part]) -> None:
        for part in parts:
            with self._changed:
                caller = self._callers.get(part.number)
                if part.last:
                    self._callers.pop(part.number, None)
            if caller is not None:
                self._measure(caller, part)
                caller.listener(part)

    def _measure(self, caller: _Caller, part: Part) -> None:
        now = time.perf_counter()
        if part.emission.tokens:
            self.failures.passes = 0
            since = caller.came if caller.heard is None else caller.heard
            self.metrics.tokens(len(part.emission.tokens), now - since, first=caller.heard is None)
            caller.heard = now
        if part.result is not None:
            self.metrics.finished(part.result, now - caller.came)
        elif part.error is not None:
            self.metrics.count("failed")
