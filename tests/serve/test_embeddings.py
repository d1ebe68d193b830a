"""/v1/embeddings: means of hidden states, compared with direct passes."""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.serve import openai
from mlx_specdec.serve.engine import EngineTask
from mlx_specdec.serve.problems import Problem

from ..support.serving import COMPLETIONS, TEXT, client_of, ok, running, wait_until


def counting(steps: list[str], name: str, most: int) -> Generator[None, None, str]:
    for _ in range(most):
        steps.append(name)
        yield
    if name == "wrong":
        raise ValueError(name)
    return name


def test_tasks_run_one_after_the_other(llama: tuple[Path, Path]) -> None:
    steps, may_begin = list[str](), threading.Event()

    def first() -> Generator[None, None, None]:
        assert may_begin.wait(60)
        yield

    named = [("left", 9), ("wrong", 1), ("last", 2)]
    with running(llama) as engine:
        engine.run(EngineTask(first(), 0, dict, 0))
        tasks = [EngineTask(counting(steps, name, most), 0, dict, 0) for name, most in named]
        left, wrong, last = tasks
        for task in tasks:
            engine.run(task)
        left.future.cancel()
        may_begin.set()
        assert last.future.result(60) == "last" and steps == ["wrong", "last", "last"]
        assert isinstance(wrong.future.exception(), ValueError)


def test_a_task_holds_its_memory_while_it_runs(llama: tuple[Path, Path]) -> None:
    """A request waits until the task has ended, because both do not fit into the budget."""
    with running(llama, memory_budget=1 << 22) as engine:
        client, may_end, taken = client_of(engine), threading.Event(), [0]

        def steps() -> Generator[None, None, int]:
            while not may_end.is_set():
                taken[0] += 1
                yield
            return 7

        task = EngineTask(steps(), 1 << 22, dict, 0)
        engine.run(task)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ok, client, COMPLETIONS, prompt=TEXT, max_tokens=3)
            # The task counts as well.
            wait_until(lambda: engine.requests == (1, 1))
            before = taken[0]
            wait_until(lambda: taken[0] > before + 20)
            assert engine.requests == (1, 1) and not task.future.done()
            gauges = client.get("/metrics").text
            assert 'model_requests_running{model_name="tiny"} 1\n' in gauges
            may_end.set()
            assert task.future.result(60) == 7 and waiting.result(60)["choices"]


def test_the_end_of_the_server_does_not_wait_for_a_step(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def stays(*_: object) -> Generator[None, None, list[Any]]:
        began.set()
        may_end.wait(20)
        yield
        return []

    monkeypatch.setattr(openai, "embed", stays)
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

    task = EngineTask(endless(), 0, dict, 0)
    with running(llama) as engine:
        engine.run(task)
    assert task.future.cancelled()
    with pytest.raises(Problem, match="shutting down"):
        engine.run(EngineTask(endless(), 0, dict, 0))
