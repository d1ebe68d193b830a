"""Ways to run the commands, and how they end."""

import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from mlx_specdec.cli import render
from mlx_specdec.cli.app import (
    batch,
    bench,
    calibrate,
    chat,
    convert,
    estimate,
    generate,
    inspect,
    pairs,
    run_one,
    serve,
    train_draft,
    train_medusa,
)

COMMANDS = {
    "batch": batch,
    "bench": bench,
    "calibrate": calibrate,
    "chat": chat,
    "convert": convert,
    "estimate": estimate,
    "generate": generate,
    "inspect": inspect,
    "pairs": pairs,
    "serve": serve,
    "train-draft": train_draft,
    "train-medusa": train_medusa,
}


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def strict(text: str | bytes) -> Any:
    """What JSON says, NaN and Infinity being none."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command as the program would, with the given arguments."""
    # Lines about what takes long would depend on the machine's speed.
    monkeypatch.setattr(render, "A_LINE_AFTER", 3600.0)

    def run_command(command: str, *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", [command, *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            run_one(COMMANDS[command])
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return run_command


Run = Callable[..., Outcome]


def fails(outcome, *parts: str) -> None:
    """One line on standard error with all parts, nothing on standard output, exit code 2."""
    assert outcome.code == 2, outcome.err
    assert outcome.out == ""
    assert outcome.err.startswith("error: ") and outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err, outcome.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
