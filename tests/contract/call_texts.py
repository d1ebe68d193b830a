"""Texts with thoughts and tool calls in many formats, and how they are read."""

import json
from pathlib import Path
from typing import Any

Said = tuple[str, str, list[Any]]
"""The content of an answer, its thought, and its calls."""
TEXTS: list[tuple[str, str, Said]] = [
    (format, text, (content, thought, [(name, arguments) for name, arguments in calls]))
    for format, text, content, thought, calls in json.loads(
        Path(__file__).with_suffix(".json").read_text(encoding="utf-8")
    )
]
"""Texts by their format. A model that writes one also has the tokens <think> and </think>."""
