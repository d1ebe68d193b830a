"""Work of the engine's thread besides the completions of the scheduler, such as embeddings."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


class Stopped(Exception):
    """The result of a task that the end of the engine has interrupted."""


@dataclass(frozen=True)
class EngineTask:
    """An answer that the engine's thread computes between the steps of the scheduler.

    Attributes:
        steps: A generator that pauses often and returns a result.
        nbytes: The largest number of bytes that it needs at once.
        answer: Turns the result into the body of the answer, in another thread.
        prompt_tokens: The number of tokens that it reads, for the log.
    """

    steps: Generator[None, None, Any]
    nbytes: int
    answer: Callable[[Any], dict[str, Any]]
    prompt_tokens: int


class TaskQueue:
    """The tasks that have not ended, in the order of arrival. Any thread may add tasks, and the
    engine's thread takes the steps of the oldest task."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks: list[tuple[EngineTask, Future[Any]]] = []

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def nbytes(self) -> int:
        """The bytes that the oldest task needs."""
        with self._lock:
            return self._tasks[0][0].nbytes if self._tasks else 0

    def add(self, task: EngineTask) -> Future[Any]:
        """Add a task, and return the future of its result. If the future is cancelled, the task is
        cancelled, too."""
        future: Future[Any] = Future()
        with self._lock:
            self._tasks.append((task, future))
        return future

    def step(self) -> None:
        """Take a step of the oldest task. An exception ends the task and becomes its result."""
        task, future = self._tasks[0]
        try:
            if not future.cancelled():
                next(task.steps)
                return
        except StopIteration as end:
            if future.set_running_or_notify_cancel():
                future.set_result(end.value)
        except Exception as problem:
            if future.set_running_or_notify_cancel():
                future.set_exception(problem)
        self._remove()

    def end(self) -> None:
        """End all tasks, whose results become the exception Stopped."""
        while self._tasks:
            _, future = self._tasks[0]
            if future.set_running_or_notify_cancel():
                future.set_exception(Stopped())
            self._remove()

    def _remove(self) -> None:
        with self._lock:
            task, _ = self._tasks.pop(0)
        task.steps.close()
