"""The thread that owns the models and decodes. Other threads submit requests and receive the steps
of completions. They never touch an array."""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import Full, SimpleQueue
from typing import Any
from weakref import WeakSet

from .. import system
from ..core.options import Options
from ..core.row import Request
from ..engine.memory import BatchSize, MemoryBudget
from ..engine.pair import Pair
from ..engine.prompt_cache import PromptCache
from ..engine.prompt_cache_files import Store
from ..engine.scheduler import Failures, Scheduler
from ..engine.turns import Turns
from ..models.wired_memory import release
from ..results import Step
from .metrics import Metrics
from .tasks import EngineTask, TaskQueue

Listener = Callable[[Step], None]
"""A callback for the steps of a request, which must return at once. It is called by the engine's
thread, or by the thread that closes the engine."""
STOPPING = "the server is shutting down"
FAILED_PASSES = 3
"""Number of failed passes in a row, without a token in between, that make /health report 503."""
PREFILL_SECONDS = 10.0
"""Seconds of a prefill after which, and interval at which, the log says how far it is."""
STEP_SECONDS = 300.0
"""Seconds after which an unfinished step is assumed to hang."""
EXIT_SECONDS = 20.0
"""Seconds in which the thread of an engine has to finish its step when Python exits."""
log = logging.getLogger(__name__)


class Worker(threading.Thread):
    """A thread that runs one engine after the other. MLX keeps a thread for each thread that has
    computed something, even after its end."""

    def __init__(self) -> None:
        super().__init__(name="engine", daemon=True)
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.start()
        _workers.add(self)

    def run(self) -> None:
        system.clear_at_end()
        while (job := self._jobs.get()) is not None:
            job()

    def do(self, job: Callable[[], None] | None) -> None:
        """Run a job after the jobs before, or end the thread if it is None."""
        self._jobs.put(job)


@dataclass
class _Pending:
    """A request that has not ended. came: Time of arrival. newest: Time of the last tokens."""

    listener: Listener
    came: float
    newest: float | None = None


class Engine:
    """A scheduler that decodes requests in a thread of its own until it is closed.

    Args:
        load: Returns the models and the default options. It is called in the thread.
        store: The files of the prompt cache, or None for no prompt cache.
        memory_budget: Bytes for all sequences, or None for the scheduler's default.
        metrics: The counters, which outlive the engine.
        turns: Decides when prompts are prefilled; all engines of a server share it.
    Attributes:
        ready: Set while `pair`, `options` and `budget` can be read.
        problem: The exception that ended the engine early, or None.
        worker: The thread, which another engine may use after this one is unloaded.
        weight_bytes: Size of the weights of all models of the pair, set before `ready`.
        nbytes: Bytes of the prompt cache, of the completions that lookup searches, and of the
            budget.
    """

    pair: Pair
    options: Options
    budget: MemoryBudget

    def __init__(
        self,
        load: Callable[[], tuple[Pair, Options]],
        *,
        batch_size: int,
        waiting: int,
        store: Store | None = None,
        memory_budget: int | None = None,
        metrics: Metrics | None = None,
        turns: Turns | None = None,
    ) -> None:
        self.metrics = metrics or Metrics()
        self.failures = Failures()
        self.ready = threading.Event()
        self.problem: BaseException | None = None
        self.batch_size = batch_size
        self.reserved_bytes = self.weight_bytes = 0
        self.nbytes = (0, 0, 0)
        self._load = load
        self._store = store
        self._memory_budget = memory_budget
        self._turns = turns or Turns()
        self._cache: PromptCache | None = None
        self._most = batch_size + waiting
        self._changed = threading.Condition()
        self._pending: dict[int, _Pending] = {}
        self._arrived: list[tuple[int, Request]] = []
        self._cancelled: list[int] = []
        self._tasks = TaskQueue()
        self._numbers = 0
        self._waiting = 0
        self._closed = self._unloads = False
        self.worker: Worker | None = None
        self._ended = threading.Event()
        self._stepped = self._logged = 0.0

    @property
    def requests(self) -> tuple[int, int]:
        """The number of running requests and the number of waiting requests. Tasks are requests,
        of which one runs at a time."""
        with self._changed:
            waiting, tasks = self._waiting + len(self._arrived), len(self._tasks)
            running = max(0, len(self._pending) - waiting)
            return running + min(tasks, 1), waiting + max(0, tasks - 1)

    @property
    def closed(self) -> bool:
        """Whether the engine accepts no more requests."""
        return self._closed

    @property
    def trouble(self) -> str | None:
        """The reason why requests make no progress, or None. Read this only after `ready` is
        set."""
        if self.problem is not None or self.worker is None or self._ended.is_set():
            return "the engine has ended"
        if self.failures.passes >= FAILED_PASSES:
            return f"{self.failures.passes} passes have failed one after the other"
        with self._changed:
            came = min((request.came for request in self._pending.values()), default=None)
        if came is not None and time.perf_counter() - max(came, self._stepped) > STEP_SECONDS:
            return f"a step has not finished in {STEP_SECONDS:.0f} seconds"
        return None

    def limit(self, nbytes: int) -> None:
        """Change the bytes for all sequences. Call this only while there are no requests, since a
        request that was accepted might not fit any more."""
        self._memory_budget = self.budget.nbytes = nbytes
        self._measure()

    def start(self, then: Callable[[], None] = lambda: None, worker: Worker | None = None) -> None:
        """Load the models, then decode.

        Args:
            then: Called after loading, and again after a problem.
            worker: The thread of an engine that was unloaded, or None for a new one.
        """
        self.worker = worker or Worker()
        _engines.add(self)
        self.worker.do(partial(self._work, then))

    def submit(self, requests: Sequence[Request], listener: Listener) -> list[int]:
        """Accept all requests or none, and return their numbers.

        Raises:
            queue.Full: If too many requests wait.
            RuntimeError: If the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(STOPPING)
            if len(self._pending) + len(requests) > self._most:
                self.metrics.count("rejected", len(requests))
                raise Full
            first, self._numbers = self._numbers, self._numbers + len(requests)
            numbers = list(range(first, self._numbers))
            self._arrived += zip(numbers, requests, strict=True)
            came = time.perf_counter()
            self._pending.update({number: _Pending(listener, came) for number in numbers})
            self._changed.notify()
        return numbers

    def run(self, task: EngineTask) -> Future[Any]:
        """Accept a task, and return its future result, an exception if it fails.

        Raises:
            queue.Full: If too many tasks or requests wait.
            RuntimeError: If the engine is closed.
        """
        with self._changed:
            if self._closed:
                raise RuntimeError(STOPPING)
            if len(self._pending) + len(self._tasks) >= self._most:
                self.metrics.count("rejected")
                raise Full
            future = self._tasks.add(task)
            self._changed.notify()
        return future

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel requests, except for requests that have ended."""
        with self._changed:
            pending = [number for number in numbers if self._pending.pop(number, None) is not None]
            self._cancelled += pending
            self._changed.notify()
        self.metrics.count("cancelled", len(pending))

    def close(self) -> None:
        """Accept no more requests, and end pending requests with an error at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._publish(self._all_with(STOPPING))

    def unload(self) -> None:
        """Close the engine, and give its memory back. Call this only after `ready` is set."""
        self._unloads = True
        self.close()

    def join(self, seconds: float) -> bool:
        """Wait for the end of the engine and of its thread, and return whether both have ended. If
        the engine was unloaded, its thread still serves other models, and does not count."""
        assert self.worker is not None, "the engine was not started"
        ended = self._ended.wait(seconds)
        if ended and not self._unloads:
            self.worker.join(seconds)
            ended = not self.worker.is_alive()
        return ended

    def _work(self, then: Callable[[], None]) -> None:
        try:
            self._load_and_decode(then)
        except BaseException as problem:
            # The caller of `start` reports it.
            self.problem = problem
            self.close()
            then()
        self._tasks.end()
        if self._cache is not None:
            self._cache.close()
        if self._unloads:
            # Requests that have ended may still refer to the engine.
            self.ready.clear()
            del self.pair, self.options, self.budget
            self._cache, self.nbytes = None, (0, 0, 0)
            system.release_memory()
        release()
        self._ended.set()
        if not self._unloads:
            assert self.worker is not None
            self.worker.do(None)

    def _load_and_decode(self, then: Callable[[], None]) -> None:
        self.pair, self.options = self._load()
        if self._store is not None:
            self._cache = self._store.open(self.pair)
        scheduler = self._begin()
        if self.batch_size > 1 and scheduler.why_not is not None:
            log.info("requests are decoded one at a time: %s", scheduler.why_not)
        self.weight_bytes = self.pair.target.nbytes + self.pair.draft_bytes
        self.ready.set()
        then()
        self._decode(scheduler)

    def _decode(self, scheduler: Scheduler) -> None:
        """Decode until the engine is closed. An error in a step ends all pending requests. An error
        that leaves the ranks of a distributed target out of step ends the engine."""
        while True:
            with self._changed:
                while scheduler.idle and not (
                    self._arrived or self._cancelled or self._closed or self._tasks
                ):
                    self._changed.wait()
                if self._closed:
                    break
                arrived, cancelled = self._arrived, self._cancelled
                self._arrived, self._cancelled = [], []
            scheduler.held = self._tasks.nbytes
            try:
                for number, request in arrived:
                    scheduler.add(number, request)
                for number in cancelled:
                    scheduler.cancel(number)
                steps = scheduler.step()
                self.reserved_bytes, self._waiting = scheduler.reserved_bytes, scheduler.waiting
                self._measure()
            except Exception as problem:
                if self.pair.target.lost:
                    raise
                log.exception("a step of the engine failed")
                self.failures.passes += 1
                scheduler, steps = self._begin(), self._all_with(self.failures.note(problem))
            self._stepped = time.perf_counter()
            self._log_prefill(scheduler)
            self._publish(steps)
            # A task waits until running requests leave enough memory, and new requests wait for it.
            if self._tasks and (
                scheduler.idle or scheduler.reserved_bytes <= scheduler.budget.nbytes
            ):
                self._tasks.step()
        scheduler.keep()
        scheduler.save_costs()

    def _log_prefill(self, scheduler: Scheduler) -> None:
        """Log now and then how far each long prefill is."""
        now = self._stepped
        if now - self._logged < PREFILL_SECONDS:
            return
        for row in scheduler.rows_in_prefill:
            if (seconds := now - row.began) >= PREFILL_SECONDS:
                self._logged = now
                log.info(
                    "prefill of a prompt: %d of %d tokens after %.0f s",
                    row.processed,
                    len(row.prompt),
                    seconds,
                )

    def _begin(self) -> Scheduler:
        size, budget = BatchSize(self.batch_size), self._memory_budget
        scheduler = Scheduler(
            self.pair,
            None,
            self.options,
            size,
            self._cache,
            self.failures,
            budget,
            turns=self._turns,
        )
        self.budget, self.reserved_bytes, self._waiting = scheduler.budget, 0, 0
        self._measure()
        return scheduler

    def _measure(self) -> None:
        held = self._cache, self.pair.history, self.budget
        cached, history, budget = (0 if holder is None else holder.nbytes for holder in held)
        self.nbytes = cached, history, budget

    def _all_with(self, error: str) -> list[Step]:
        """Return steps that end all pending requests with an error."""
        with self._changed:
            self._arrived = []
            return [Step(number, finish_reason="failed", error=error) for number in self._pending]

    def _publish(self, steps: Sequence[Step]) -> None:
        for step in steps:
            with self._changed:
                pending = self._pending.get(step.number)
                if step.last:
                    self._pending.pop(step.number, None)
            if pending is None:
                continue
            now = time.perf_counter()
            if step.tokens:
                self.failures.passes = 0
                since = pending.came if pending.newest is None else pending.newest
                first = pending.newest is None
                self.metrics.tokens(len(step.tokens), now - since, first=first)
                pending.newest = now
            if step.result is not None:
                self.metrics.finished(step.result, now - pending.came)
            elif step.error is not None:
                self.metrics.count("failed")
            pending.listener(step)


_engines: WeakSet[Engine] = WeakSet()
_workers: WeakSet[Worker] = WeakSet()


@atexit.register
def end_all() -> None:
    """End the threads of all engines before Python exits. A thread that returned from MLX after
    that would abort the process: Python ends it in a destructor of MLX, which must not throw."""
    for engine in list(_engines):
        engine.close()
    for worker in list(_workers):
        worker.do(None)
        worker.join(EXIT_SECONDS)
