"""One JSON file -> a dictionary, or a sentence that names the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import CheckpointError


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError where it cannot be read or is no JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    return value
