"""The batch command, ended early: the same command goes on, and ends with the same bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli.batch_files import Journal

from ..support.batches import ENDLESS, left_in, sentences, write
from ..support.commands import Run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def interrupt_after(count: int, patch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does, once this many results are written."""
    shipped = Journal.append

    def append(self: Journal, record: dict[str, Any]) -> None:
        shipped(self, record)
        if self.done == count:
            raise KeyboardInterrupt

    patch.setattr(Journal, "append", append)


@pytest.mark.parametrize("count", [1, 5, 11])
def test_an_interrupted_run_goes_on_with_the_same_bytes(
    run: Run, t5: Path, t5_draft: Path, tmp_path: Path, output: Path, count: int
) -> None:
    file = write(tmp_path / "in.txt", sentences(11))
    asked = ("--model", t5, "--draft-model", t5_draft, "-m", 9, "--temp", 0.8)
    assert run("batch", file, "-o", tmp_path / "whole", *asked).code == 0
    asked = ("batch", file, "-o", output, *asked)
    with pytest.MonkeyPatch.context() as patch:
        interrupt_after(count, patch)
        done = run(*asked, "--batch-size", 4)
    assert done.code == 130 and left_in(output.parent) == ["out.jsonl.partial"]
    assert f"interrupted: {count} of 11 texts are in" in done.err
    assert "the same command goes on from here" in done.err
    done = run(*asked, "--top-k", 3)
    assert done.code == 2 and "with --top-k 0, not 3" in done.err
    done = run(*asked, "--batch-size", 3)
    assert done.code == 0 and f"going on: {count} of 11 texts are there" in done.err
    assert f"\n{11 - count} texts, " in done.err
    assert output.read_bytes() == (tmp_path / "whole").read_bytes()
    assert left_in(output.parent) == ["out.jsonl"]


STOPPING = """
import os, sys
from mlx_specdec.cli.batch_files import Journal
from mlx_specdec.cli import start

results, number = map(int, (sys.argv.pop(1), sys.argv.pop(1)))
shipped = Journal.append

def append(self, record):
    shipped(self, record)
    if self.done == results:
        os.kill(os.getpid(), number)

Journal.append = append
start.main()
"""
"""A command that sends itself a signal once so many results are written."""


def command(file: Path, output: Path, model: Path) -> list[str]:
    asked = ["batch", file, "-o", output, "--model", model, "-m", 24, "--batch-size", 4, *ENDLESS]
    return [*map(str, asked), "--temperature", "0.9"]


def finish(words: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "mlx_specdec", *words], check=True, env=ENVIRONMENT)


def stop_after(results: int, how: signal.Signals, words: list[str]) -> tuple[int, str]:
    """Run until a signal ends it; the exit code and standard error."""
    line = [sys.executable, "-c", STOPPING, str(results), str(int(how)), *words]
    done = subprocess.run(line, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


@pytest.fixture(scope="module")
def whole(t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run that nobody stops writes, beside its prompts."""
    place = tmp_path_factory.mktemp("whole")
    file = write(place / "in.txt", sentences(60))
    finish(command(file, place / "out", t5))
    return place / "out"


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_stopped_again_and_again_ends_with_the_same_bytes(
    t5: Path, whole: Path, output: Path, how: signal.Signals
) -> None:
    file = whole.with_name("in.txt")
    words = command(file, output, t5)
    for results in (1, 8, 34):
        code, err = stop_after(results, how, words)
        assert code == (-signal.SIGKILL if how == signal.SIGKILL else 130)
        assert "Traceback" not in err
        if how == signal.SIGINT:
            assert f"interrupted: {results} of 60 texts are in" in err
            assert "the same command goes on from here" in err
        assert left_in(output.parent) == ["out.jsonl.partial"]
    finish(words)
    assert output.read_bytes() == whole.read_bytes()
    assert left_in(output.parent) == ["out.jsonl"]
