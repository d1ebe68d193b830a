"""Commands in this process, and the files that they read and write."""

import io
import json
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ..contract.support import Outcome, command


def strict(text: str | bytes) -> Any:
    """Parse JSON, without NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


Run = Callable[..., Outcome]


@pytest.fixture
def run() -> Run:
    """Run a command as the program would, with the given arguments and this stdin."""

    def run_command(*arguments: object) -> Outcome:
        typed = sys.stdin.read() if isinstance(sys.stdin, io.StringIO) else ""
        return command(*arguments, stdin=typed)

    return run_command


def fails(outcome: Outcome, *parts: str) -> None:
    """Check that a command has refused its input with one line that has all parts."""
    outcome.refuses(*parts)


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
