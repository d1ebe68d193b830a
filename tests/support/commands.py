"""Ways to run the commands, and how they end."""

import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.cli import app, render

COMMANDS = (
    *("batch", "bench", "chat", "convert", "doctor", "estimate", "generate"),
    *("inspect", "models", "pairs", "serve", "train-draft", "train-medusa"),
)


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    code: int
    out: str
    err: str


def strict(text: str | bytes) -> Any:
    """Parse JSON, without NaN and Infinity."""

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
            app.run_one(getattr(app, command.replace("-", "_")))
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


WORDS = ["les", "pates", "a", "midi", "cuire", "deux", "oeufs", "dans", "une", "grande"]
ENDLESS = ("--logit-bias", "1=-1e9")


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 12))) for _ in range(count)]


def records(file: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in file.read_bytes().splitlines()]


def write(file: Path, rows: Sequence[object]) -> Path:
    report = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text("".join(f"{row}\n" for row in report), encoding="utf-8")
    return file


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


MEMORY = "the memory does not suffice"
FAILED = "[METAL] Command buffer execution failed: "
REASON = "kIOGPUCommandBufferCallbackError"
SAID = {
    "[malloc] Unable to allocate 4398046511104 bytes.": MEMORY,
    "[metal::malloc] Attempting to allocate 4398046511104 bytes which is greater than the maximum "
    "allowed buffer size of 9534832640 bytes.": MEMORY,
    f"{FAILED}Insufficient Memory (00000008:{REASON}OutOfMemory)": MEMORY,
    f"{FAILED}Caused GPU Timeout Error (00000002:{REASON}Timeout)": "a pass that took too long",
    f"{FAILED}Impacting Interactivity (0000000e:{REASON}ImpactingInteractivity)": "the screen",
}
"""Message of MLX 0.32 if memory ends or the GPU gives up -> part of the line for the user."""
