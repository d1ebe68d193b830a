"""The engine: requests come and go at any time, from any thread, and texts are what they are."""

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine import request as engine_request
from mlx_specdec.engine.memory import MemoryBudget
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.results import Step
from mlx_specdec.serve import engine as engine_module
from mlx_specdec.serve import requests
from mlx_specdec.serve.engine import STOPPING
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support import tiny
from ..support.serving import (
    COMPLETIONS,
    OPTIONS,
    TEXT,
    ask,
    client_of,
    ok,
    running,
    wait_until,
)
from ..support.tokenizers import byte_level

ENDLESS = replace(OPTIONS, max_tokens=4000)


def test_closing_ends_requests_during_a_long_step(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    began, goes_on = threading.Event(), threading.Event()

    def waits(self: Scheduler) -> list[Step]:
        began.set()
        assert goes_on.wait(60)
        return []

    monkeypatch.setattr(Scheduler, "step", waits)
    with running(llama) as engine:
        _, heard = ask(engine)
        assert began.wait(60)
        engine.close()
        assert heard.parts.get(timeout=30).error == STOPPING
        goes_on.set()
        assert engine.join(60)
    assert heard.parts.empty()


def test_a_step_that_never_ends_is_reported(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    def waits(self: Scheduler) -> list[Step]:
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


def test_an_engine_whose_ranks_have_lost_step_ends(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a new start of all of them helps."""

    def lost(self: Scheduler) -> list[Step]:
        type(engine.pair.target).lost = True
        raise ValueError("half a pass")

    monkeypatch.setattr(DecoderOnlyModel, "lost", False, raising=False)
    monkeypatch.setattr(Scheduler, "step", lost)
    with running(llama) as engine:
        assert ask(engine)[1].last().error == STOPPING
        assert engine.join(60)
        assert isinstance(engine.problem, ValueError)


def test_an_engine_logs_why_it_decodes_one_request_at_a_time(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = load_tokenizer(byte_level(tmp_path), kind="decoder-only").size
    model = tiny.write("recurrent_gemma", tmp_path, vocab_size=size)
    with caplog.at_level("INFO"), running((model, None), batch_size=2):
        pass
    reason = "cannot take several sequences in one pass: the recurrent state of an empty sequence"
    assert f"requests are decoded one at a time: {model} {reason}" in caplog.text


LEFT = """
import sys, threading
from pathlib import Path
from mlx_specdec.engine.embeddings import embed
from mlx_specdec.engine.loading import load
from mlx_specdec.core.options import Options
from mlx_specdec.serve.engine import Engine, EngineTask

engine = Engine(lambda: (load(Path(sys.argv[1])), Options()), batch_size=1)
began = threading.Event()
engine.ready.wait()

def endless():
    for _ in embed(engine.pair, [[5] * 400] * 1_000_000):
        began.set()
        yield

engine.run(EngineTask(endless(), 0, dict, 0))
began.wait()
engine.close()
"""
"""A program that exits while a thread computes embeddings."""


def test_python_exits_after_the_thread_has_ended(llama: tuple[Path, Path]) -> None:
    """Otherwise, the process ends with "terminate called without an active exception"."""
    line = [sys.executable, "-c", LEFT, str(llama[0])]
    done = subprocess.run(line, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_request_is_prepared_once(
    llama: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = dict.fromkeys(("prepared", "check"), 0)
    prepared, check = engine_request.prepared, MemoryBudget.check

    def counted_prepared(*given: Any) -> Any:
        counts["prepared"] += 1
        return prepared(*given)

    def counted_check(*given: Any) -> None:
        counts["check"] += 1
        check(*given)

    monkeypatch.setattr(engine_request, "prepared", counted_prepared)
    monkeypatch.setattr(requests, "prepared", counted_prepared)
    monkeypatch.setattr(MemoryBudget, "check", counted_check)
    with running(llama) as engine:
        assert ok(client_of(engine), COMPLETIONS, prompt=TEXT, max_tokens=2)["choices"]
    assert counts == {"prepared": 1, "check": 0}
