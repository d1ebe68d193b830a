"""The repository's root, and prompts for the models in weights/."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def prompts(file: str, count: int) -> list[str]:
    """So many of a file in prompts/, from all over it."""
    lines = (ROOT / "prompts" / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]
