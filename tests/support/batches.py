"""Files of prompts for the tests of the batch command, and what it leaves."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .commands import strict

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
