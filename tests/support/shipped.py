"""The repository's root, and the models in weights/ with their prompts."""

import json
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def python_path() -> str:
    """Return PYTHONPATH for a process of a test: the root, and what tests/conftest.py has added."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def prompts(file: str, count: int) -> list[str]:
    """Return some prompts of a file in prompts/, evenly spaced."""
    lines = (ROOT / "prompts" / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]
