"""/v1/embeddings: means of hidden states, compared with direct passes."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.serve import embeddings
from mlx_specdec.serve.tasks import EngineTask, Stopped, TaskQueue

from ..support.serving import COMPLETIONS, TEXT, client_of, ok, running, wait_until


def counting(steps: list[str], name: str, most: int) -> Generator[None, None, str]:
    for _ in range(most):
        steps.append(name)
        yield
    if name == "wrong":
        raise ValueError(name)
    return name


def test_tasks_run_one_after_the_other() -> None:
    queue, steps = TaskQueue(), list[str]()
    named = [("first", 2, 5), ("left", 9, 7), ("wrong", 1, 6), ("last", 1, 8)]
    tasks = [
        EngineTask(counting(steps, name, most), nbytes, dict, 0) for name, most, nbytes in named
    ]
    first, left, wrong, last = [queue.add(task) for task in tasks]
    assert queue.nbytes == 5
    left.cancel()
    while len(queue) > 1:
        queue.step()
    assert steps == ["first", "first", "wrong"] and first.result() == "first"
    assert isinstance(wrong.exception(), ValueError) and queue.nbytes == 8
    queue.end()
    assert isinstance(last.exception(), Stopped) and not len(queue)


def test_a_task_holds_its_memory_while_it_runs(llama: tuple[Path, Path]) -> None:
    """A request waits until the task has ended, because both do not fit into the budget."""
    with running(llama, memory_budget=1 << 22) as engine:
        client, may_end, taken = client_of(engine), threading.Event(), [0]

        def steps() -> Generator[None, None, int]:
            while not may_end.is_set():
                taken[0] += 1
                yield
            return 7

        future = engine.run(EngineTask(steps(), 1 << 22, dict, 0))
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ok, client, COMPLETIONS, prompt=TEXT, max_tokens=3)
            # The task counts as well.
            wait_until(lambda: engine.requests == (1, 1))
            before = taken[0]
            wait_until(lambda: taken[0] > before + 20)
            assert engine.requests == (1, 1) and not future.done()
            gauges = client.get("/metrics").text
            assert 'model_requests_running{model_name="tiny"} 1.0' in gauges
            may_end.set()
            assert future.result(60) == 7 and waiting.result(60)["choices"]


def test_the_end_of_the_server_does_not_wait_for_a_step(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def stays(*_: object) -> Generator[None, None, list[Any]]:
        began.set()
        may_end.wait(20)
        yield
        return []

    monkeypatch.setattr(embeddings, "embed", stays)
    with running(llama) as engine, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client_of(engine).post, "/v1/embeddings", json={"input": TEXT})
        assert began.wait(60)
        engine.close()
        assert answer.result(60).status_code == 503 and not may_end.is_set()
        assert not engine.join(0)
        may_end.set()


def test_the_end_of_the_server_ends_tasks(llama: tuple[Path, Path]) -> None:
    def endless() -> Generator[None, None, None]:
        while True:
            yield

    with running(llama) as engine:
        future = engine.run(EngineTask(endless(), 0, dict, 0))
    assert isinstance(future.exception(60), Stopped)
    with pytest.raises(RuntimeError):
        engine.run(EngineTask(endless(), 0, dict, 0))
