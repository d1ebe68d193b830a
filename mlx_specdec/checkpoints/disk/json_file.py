"""One JSON file -> a dictionary, or a sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .regular import check_regular

DEEPEST = 50
"""Objects and lists in each other; those of real files have seven."""


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError where it cannot be read or is no JSON object."""
    check_regular(file)
    try:
        value = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    if _is_deeper(value, DEEPEST):
        raise CheckpointError(f"{file} is refused: it nests more than {DEEPEST} objects and lists")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    """Whether objects and lists lie in each other more than `levels` deep. Whoever walks through
    such a value by recursion would overrun Python's stack."""
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for part in inner for each in part if isinstance(each, dict | list)]
    return bool(level)
