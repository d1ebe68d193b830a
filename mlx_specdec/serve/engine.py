"""The thread that owns a model and decodes. Other threads submit requests and receive the steps of
completions. They never touch an array.

The engine also counts the metrics of its model, which have Prometheus' text format. Counters that
vLLM also has are named as in vLLM, so that tools for vLLM can read them."""

import itertools
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

from .. import system
from ..core.options import Options
from ..core.row import Request
from ..engine.memory import BatchSize, MemoryBudget
from ..engine.pair import Pair
from ..engine.prompt_cache import PromptCache, Store
from ..engine.scheduler import Failures, Scheduler
from ..engine.turns import Turns
from ..models.wired_memory import release
from ..results import Result, Step
from .problems import busy

Listener = Callable[[Step], None]
"""A callback for the steps of a request, which must return at once. It is called by the engine's
thread, or by the thread that closes the engine."""
CONNECTIONS = 1024
"""Connections that are accepted, and completions of an engine that have not ended. Further
connections are closed."""
STOPPING = "the server is shutting down"
FAILED_PASSES = 3
"""Number of failed passes in a row, without a token in between, that make /health report 503."""
PREFILL_SECONDS = 10.0
"""Seconds of a prefill after which, and interval at which, the log says how far it is."""
STEP_SECONDS = 300.0
"""Seconds after which an unfinished step is assumed to hang."""
WAKE = -1, None
"""The cancellation of no request, which wakes an engine that has nothing to do."""
GENERATED = "vllm:generation_tokens_total"
CANCELLED = "mlx_specdec:requests_cancelled_total"
REJECTED = "mlx_specdec:requests_rejected_total"
FAILED = "mlx_specdec:requests_failed_total"
METRICS = {
    "mlx_specdec:prompt_cache_bytes": "Bytes of the prompt cache.",
    "mlx_specdec:history_bytes": "Bytes of texts that are looked up.",
    "mlx_specdec:memory_reserved_bytes": "Bytes that requests may take.",
    "mlx_specdec:memory_budget_bytes": "Bytes that all requests may take together.",
    "mlx_specdec:model_loaded": "Whether the model is in memory.",
    "mlx_specdec:model_bytes": "Bytes of its weights in memory.",
    "mlx_specdec:model_requests_running": "Requests decoded now.",
    "mlx_specdec:model_requests_waiting": "Requests waiting now.",
    "vllm:prompt_tokens_total": "Tokens of prompts.",
    GENERATED: "Tokens of answers.",
    "vllm:prefix_cache_queries_total": "Prompt tokens looked for in the cache.",
    "vllm:prefix_cache_hits_total": "Prompt tokens that were not read again.",
    "vllm:request_success_total": "Requests with a whole answer.",
    CANCELLED: "Clients that left, or were too late.",
    REJECTED: "Requests that found the queue full.",
    FAILED: "Requests that an error here ended.",
    "vllm:spec_decode_num_drafts_total": "Rounds with draft tokens, of each request.",
    "vllm:spec_decode_num_draft_tokens_total": "Draft tokens.",
    "vllm:spec_decode_num_accepted_tokens_total": "Draft tokens that were accepted.",
}
"""The description of each metric, by its name. The names of counters end with _total, and all other
metrics are gauges."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineTask:
    """An answer that the engine's thread computes between the steps of the scheduler, such as
    embeddings.

    Attributes:
        steps: A generator that pauses often and returns a result.
        nbytes: The largest number of bytes that it needs at once.
        answer: Turns the result into the body of the answer, in another thread.
        prompt_tokens: The number of tokens that it reads, for the log.
        future: The result or the exception. To cancel the future is to cancel the task.
    """

    steps: Generator[None, None, Any]
    nbytes: int
    answer: Callable[[Any], dict[str, Any]]
    prompt_tokens: int
    future: Future[Any] = field(default_factory=Future)


@dataclass(eq=False)
class Engine:
    """A scheduler that loads models in a thread of its own, and decodes requests there until it is
    closed.

    Attributes:
        load: Returns the models and the default options. It is called in the thread.
        store: The files of the prompt cache.
        memory_budget: Bytes for all sequences, or None for the scheduler's default.
        counters: The counters of the metrics, which outlive the engine. The engine's thread and the
            event loop's thread count under different names.
        turns: Decides when prompts are prefilled; all engines of a server share it.
        threads: The threads of all engines, or None for a new one.
        ready: Set when the models are loaded, so that `pair`, `options` and `budget` can be read.
        closed: Whether the engine accepts no more requests.
        problem: The exception that ended the engine early, or None.
        gauges: The sizes in the metrics, by name.
    """

    load: Callable[[], tuple[Pair, Options]]
    batch_size: int
    store: Store = field(default=Store(0))
    memory_budget: int | None = None
    counters: Counter[str] = field(default_factory=Counter)
    turns: Turns = field(default_factory=Turns)
    threads: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        self.pair: Pair
        self.options: Options
        self.budget: MemoryBudget
        self.failures = Failures()
        self.ready = threading.Event()
        self.closed = False
        self.problem: BaseException | None = None
        self.gauges: dict[str, int] = {}
        self._cache: PromptCache | None = None
        # Held while requests are accepted, so that none is accepted after the engine has closed.
        self._lock = threading.Lock()
        # Number of a request that has not ended -> its listener.
        self._pending: dict[int, Listener] = {}
        # Numbers with new requests, or with None for cancelled requests.
        self._inbox: SimpleQueue[tuple[int, Request | None]] = SimpleQueue()
        self._tasks: deque[EngineTask] = deque()
        self._numbers = itertools.count()
        self._waiting = 0
        self._stepped = self._logged = 0.0
        self._work = (self.threads or ThreadPoolExecutor(1)).submit(self._run)

    @property
    def requests(self) -> tuple[int, int]:
        """The number of running requests and the number of waiting requests. Tasks are requests,
        of which one runs at a time."""
        pending, tasks = len(self._pending), len(self._tasks)
        waiting = min(pending, self._waiting + self._inbox.qsize())
        return pending - waiting + min(tasks, 1), waiting + max(0, tasks - 1)

    @property
    def ended(self) -> bool:
        """Whether the engine has ended and has given its memory back."""
        return self._work.done()

    @property
    def trouble(self) -> str | None:
        """The reason why requests make no progress, or None."""
        if self.failures.passes >= FAILED_PASSES:
            return f"{self.failures.passes} passes have failed one after the other"
        if self._pending and time.perf_counter() - self._stepped > STEP_SECONDS:
            return f"a step has not finished in {STEP_SECONDS:.0f} seconds"
        return None

    def limit(self, nbytes: int) -> None:
        """Change the bytes for all sequences. Call this only while there are no requests, since a
        request that was accepted might not fit any more."""
        self.memory_budget = self.budget.nbytes = nbytes

    def submit(self, requests: Sequence[Request], listener: Listener) -> list[int]:
        """Accept all requests or none, and return their numbers. Raises Problem."""
        with self._lock:
            self._check_open(len(requests))
            numbers = [next(self._numbers) for _ in requests]
            self._pending.update(dict.fromkeys(numbers, listener))
        for arrived in zip(numbers, requests, strict=True):
            self._inbox.put(arrived)
        return numbers

    def run(self, task: EngineTask) -> None:
        """Accept a task. Raises Problem."""
        self._check_open(1)
        self._tasks.append(task)
        self._inbox.put(WAKE)

    def _check_open(self, more: int) -> None:
        if self.closed:
            raise busy(STOPPING)
        if len(self._pending) + len(self._tasks) + more > CONNECTIONS:
            self.counters[REJECTED] += more
            raise busy("too many requests wait already: try again", 429, "queue_full")

    def cancel(self, numbers: Sequence[int]) -> None:
        """Cancel requests, except for requests that have ended."""
        for number in numbers:
            if self._pending.pop(number, None) is not None:
                self._inbox.put((number, None))
                self.counters[CANCELLED] += 1

    def close(self) -> None:
        """Accept no more requests, and end pending requests with an error at once. The memory is
        given back after the current step."""
        with self._lock:
            self.closed = True
        self._publish(self._all_with(STOPPING))
        self._inbox.put(WAKE)

    def join(self, seconds: float) -> bool:
        """Wait for the end of the engine, and return whether it has ended."""
        return bool(wait([self._work], seconds).done)

    def _run(self) -> None:
        try:
            self._load_and_decode()
        except BaseException as problem:
            self.problem = problem
        self.close()
        for task in self._tasks:
            task.future.cancel()
        if self._cache is not None:
            self._cache.close()
        # Requests that have ended may still refer to the engine.
        for name in ("pair", "options", "budget"):
            vars(self).pop(name, None)
        self._cache, self.gauges = None, {}
        system.release_memory()
        release()

    def _load_and_decode(self) -> None:
        """Decode until the engine is closed. An error in a step ends all pending requests. An error
        that leaves the ranks of a distributed target out of step ends the engine."""
        self.pair, self.options = self.load()
        self._cache = self.store.open(self.pair)
        scheduler = self._begin()
        if self.batch_size > 1 and scheduler.why_not is not None:
            log.info("requests are decoded one at a time: %s", scheduler.why_not)
        self.ready.set()
        while self._takes(scheduler):
            scheduler.held = self._tasks[0].nbytes if self._tasks else 0
            try:
                steps = scheduler.step()
                self._measure(scheduler)
            except Exception as problem:
                if self.pair.target.lost:
                    raise
                log.exception("a step of the engine failed")
                self.failures.passes += 1
                scheduler, steps = self._begin(), self._all_with(self.failures.note(problem))
            self._log_prefill(scheduler)
            self._publish(steps)
            # A task waits until running requests leave enough memory, and new requests wait for it.
            fits = scheduler.idle or scheduler.reserved_bytes <= scheduler.budget.nbytes
            if self._tasks and fits:
                self._advance(self._tasks[0])
        scheduler.keep()
        scheduler.save_costs()

    def _takes(self, scheduler: Scheduler) -> bool:
        """Hand new requests and cancellations to the scheduler, and return whether the engine is
        still open. Wait if there is nothing to do."""
        while not (self._inbox.empty() and (self.closed or self._tasks or not scheduler.idle)):
            number, request = self._inbox.get()
            if request is None:
                scheduler.cancel(number)
            elif number in self._pending:
                scheduler.add(number, request)
        self._stepped = time.perf_counter()
        return not self.closed

    def _advance(self, task: EngineTask) -> None:
        """Take a step of a task. An exception ends the task and becomes its result."""
        with suppress(InvalidStateError):  # the future is cancelled at any time
            try:
                if not task.future.cancelled():
                    next(task.steps)
                    return
            except StopIteration as end:
                task.future.set_result(end.value)
            except Exception as problem:
                task.future.set_exception(problem)
        self._tasks.popleft()
        task.steps.close()

    def _log_prefill(self, scheduler: Scheduler) -> None:
        """Log now and then how far each long prefill is."""
        text = "prefill of a prompt: %d of %d tokens after %.0f s"
        now, due = self._stepped, self._stepped - PREFILL_SECONDS
        for row in scheduler.rows_in_prefill if self._logged <= due else ():
            if row.began <= due:
                self._logged = now
                log.info(text, row.processed, len(row.prompt), now - row.began)

    def _begin(self) -> Scheduler:
        arguments = self.pair, None, self.options, BatchSize(self.batch_size), self._cache
        scheduler = Scheduler(*arguments, self.failures, self.memory_budget, turns=self.turns)
        self.budget = scheduler.budget
        self._measure(scheduler)
        return scheduler

    def _measure(self, scheduler: Scheduler) -> None:
        cache, history = self._cache, self.pair.history
        self._waiting = len(scheduler.waiting)
        self.gauges = {
            "mlx_specdec:prompt_cache_bytes": 0 if cache is None else cache.nbytes,
            "mlx_specdec:history_bytes": 0 if history is None else history.nbytes,
            "mlx_specdec:memory_reserved_bytes": scheduler.reserved_bytes,
            "mlx_specdec:memory_budget_bytes": self.budget.nbytes,
        }

    def _all_with(self, error: str) -> list[Step]:
        """Return steps that end all pending requests with an error."""
        pending = list(self._pending)
        return [Step(number, finish_reason="failed", error=error) for number in pending]

    def _publish(self, steps: Sequence[Step]) -> None:
        for step in steps:
            listener = (self._pending.pop if step.last else self._pending.get)(step.number, None)
            if listener is None:
                continue
            if step.tokens:
                self.failures.passes = 0
                self.counters[GENERATED] += len(step.tokens)
            if step.result is not None:
                self.counters.update(counts_of(step.result))
            elif step.error is not None:
                self.counters[FAILED] += 1
            listener(step)


def counts_of(result: Result) -> dict[str, int]:
    """Return what a request that has ended adds to the counters, by the counter's name."""
    stats, labels = result.stats, result.labels
    return {
        "vllm:prompt_tokens_total": labels.prompt_tokens,
        "vllm:prefix_cache_queries_total": labels.prompt_tokens,
        "vllm:prefix_cache_hits_total": labels.cached_tokens,
        "vllm:request_success_total": 1,
        "vllm:spec_decode_num_drafts_total": next(iter(stats.drafted_by_position), 0),
        "vllm:spec_decode_num_draft_tokens_total": stats.drafted,
        "vllm:spec_decode_num_accepted_tokens_total": stats.accepted,
    }


def as_text(models: Mapping[str, Mapping[str, float]]) -> str:
    """Return all metrics in Prometheus' text format. models: The numbers of each model by the names
    of the metrics, by the name of the model. A metric without a number is 0."""
    lines = []
    for name, description in METRICS.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# HELP {name} {description}", f"# TYPE {name} {kind}"]
        for model, numbers in models.items():
            escaped = model.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
            lines.append(f'{name}{{model_name="{escaped}"}} {numbers.get(name, 0)}')
    return "\n".join([*lines, ""])
