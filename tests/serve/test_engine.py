"""The engine: requests come and go at any time, from any thread, and texts are what they are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.decoding.stop_criteria import Emission
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.request import Job, Part, Request
from mlx_specdec.engine.scheduler import BROKEN, Scheduler
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.serve import engine as engine_module
from mlx_specdec.serve.engine import FAILED_PASSES, STOPPING, Engine, QueueFull
from mlx_specdec.serve.service import ResponseStream

from ..support.serving import OPTIONS, PROMPT, Heard, ask, running, wait_until

ENDLESS = replace(OPTIONS, max_tokens=4000)


def test_a_request_is_heard_of_until_it_ends(engine: Engine, alone: Callable[..., str]) -> None:
    options = replace(OPTIONS, temperature=0.7, seed=3)
    number, heard = ask(engine, options)
    parts = []
    while not parts or not parts[-1].last:
        parts.append(heard.parts.get(timeout=60))
    assert {part.number for part in parts} == {number}
    text = "".join(part.emission.text for part in parts)
    assert text == parts[-1].result.text == alone(PROMPT, temperature=0.7, seed=3)


def test_requests_of_many_threads_are_decoded_together(
    engine: Engine, alone: Callable[..., str]
) -> None:
    wanted = {seed: alone(PROMPT, temperature=1.0, seed=seed) for seed in range(12)}
    got: dict[int, str] = {}

    def work(seed: int) -> None:
        time.sleep(0.003 * seed)
        _, heard = ask(engine, replace(OPTIONS, temperature=1.0, seed=seed))
        got[seed] = heard.last().result.text

    threads = [threading.Thread(target=work, args=[seed]) for seed in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == wanted


def test_who_leaves_is_not_heard_of_again_and_makes_room(engine: Engine) -> None:
    asked = [ask(engine, ENDLESS) for _ in range(6)]
    wait_until(lambda: engine.requests == (4, 2))
    engine.cancel([number for number, _ in asked])
    assert engine.requests[0] == 0
    _, heard = ask(engine)
    assert heard.last().result is not None
    for _, each in asked:
        while not each.parts.empty():
            assert not each.parts.get().last


def test_a_full_queue_takes_no_part_of_a_request(llama: tuple[Path, Path]) -> None:
    with running(llama, batch_size=1, waiting=2) as engine:
        requests = [Request(PROMPT, ENDLESS)] * 2
        numbers = engine.submit(requests, Heard())
        with pytest.raises(QueueFull):
            engine.submit(requests, Heard())
        engine.cancel(numbers)
        _, heard = ask(engine)
        assert heard.last().result is not None


def test_closing_ends_what_is_there_with_an_error(llama: tuple[Path, Path]) -> None:
    with running(llama, batch_size=1) as engine:
        asked = [ask(engine, ENDLESS)[1] for _ in range(3)]
        engine.close()
        assert [heard.last().error for heard in asked] == [STOPPING] * 3
        with pytest.raises(RuntimeError, match=STOPPING):
            engine.submit([Request(PROMPT, OPTIONS)], Heard())


def test_a_step_that_fails_ends_its_requests_and_not_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> list[Part]:
        raise ValueError("/some/path is broken")

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", broken)
        for failed in range(1, FAILED_PASSES + 1):
            assert engine.trouble is None
            assert ask(engine)[1].last().error == f"{BROKEN} (ValueError)"
            wait_until(lambda: engine.failures.passes == failed)  # noqa: B023
        assert "passes have failed" in engine.trouble
        assert (engine.failures.count, engine.failures.last) == (FAILED_PASSES, "ValueError")
    assert ask(engine)[1].last().result is not None
    assert engine.trouble is None


def test_a_step_that_never_ends_is_told_and_so_is_an_engine_that_is_no_more(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def waits(self: Scheduler) -> list[Part]:
        assert goes_on.wait(60)
        return []

    with running(llama) as engine:
        assert engine.trouble is None
        with monkeypatch.context() as patch:
            patch.setattr(engine_module, "STEP_SECONDS", 0.0)
            patch.setattr(Scheduler, "step", waits)
            number, _ = ask(engine)
            wait_until(lambda: engine.trouble is not None)
            assert "not finished" in engine.trouble
            engine.cancel([number])
            assert engine.trouble is None
            goes_on.set()
        engine.close()
        assert engine.join(60)
        assert engine.trouble == "the engine has ended"


def test_an_engine_whose_ranks_have_lost_step_ends(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a new start of all of them helps."""

    def lost(self: Scheduler) -> list[Part]:
        type(engine.pair.target).lost = True
        raise ValueError("half a pass")

    monkeypatch.setattr(DecoderOnlyModel, "lost", False, raising=False)
    monkeypatch.setattr(Scheduler, "step", lost)
    with running(llama) as engine:
        assert ask(engine)[1].last().error == STOPPING
        assert engine.join(60)
        assert isinstance(engine.problem, ValueError)


def test_an_engine_that_breaks_ends_all_and_says_why(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(llama) as engine:
        _, first = ask(engine, ENDLESS)
        first.parts.get(timeout=60)

        def broken(caller: object, part: Part) -> None:
            if part.error is None:
                raise ValueError("a fault of ours")

        monkeypatch.setattr(engine, "_measure", broken)
        assert first.last().error == STOPPING
        wait_until(lambda: engine.problem is not None)
        with pytest.raises(RuntimeError, match=STOPPING):
            ask(engine)
    assert isinstance(engine.problem, ValueError)


def test_a_request_that_cannot_be_begun_does_not_touch_the_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, other = ask(engine, replace(OPTIONS, max_tokens=200))
    shipped = Job.of

    def broken(pair: Pair, number: int, request: Request, *others: object) -> Job:
        if request.options.seed == 13:
            raise ValueError("unlucky")
        return shipped(pair, number, request, *others)

    monkeypatch.setattr(Job, "of", broken)
    assert ask(engine, replace(OPTIONS, seed=13))[1].last().error == f"{BROKEN} (ValueError)"
    assert "empty" in ask(engine, prompt=[])[1].last().error
    assert other.last().result is not None


def test_what_cannot_be_loaded_is_told_to_who_started_it() -> None:
    def load() -> tuple[Pair, object]:
        raise CheckpointError("no weights here")

    engine, told = Engine(load, batch_size=1, waiting=1), threading.Event()
    engine.start(then=told.set)
    assert told.wait(60) and engine.join(60)
    assert isinstance(engine.problem, CheckpointError)
    assert not engine.ready.is_set()


def test_a_long_prompt_is_read_between_rounds_of_others(engine: Engine) -> None:
    options, heard = replace(OPTIONS, prefill_step_size=8, max_tokens=300), Heard()
    [short] = engine.submit([Request(PROMPT, options)], heard)
    heard.parts.get(timeout=60)
    [long] = engine.submit([Request([7] * 800, options)], heard)
    between = 0
    while (part := heard.parts.get(timeout=60)).number != long:
        assert part.number == short
        between += 1
    assert between > 50
    engine.cancel([short, long])


def test_what_comes_behind_the_close_is_dropped() -> None:
    cancelled: list[int] = []
    engine: Any = SimpleNamespace(
        submit=lambda requests, hear: [7, 8], cancel=lambda numbers: cancelled.extend(numbers)
    )

    async def talk_and_leave() -> list[object]:
        parsed: Any = SimpleNamespace(requests=[None, None], reader=object)
        stream = ResponseStream(engine, parsed, Any, 60.0)

        async def listen() -> list[object]:
            return [each async for each in stream._steps()]

        listening = asyncio.create_task(listen())
        await asyncio.sleep(0)
        stream._hear(Part(7, Emission((), ())))
        stream.close()
        return await listening

    assert asyncio.run(talk_and_leave()) == []
    assert cancelled == [7, 8]
