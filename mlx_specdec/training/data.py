"""A file of texts -> pairs of prompt and continuation.

Knows the file's two formats. Knows no tokenizer and no model.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError


@dataclass(frozen=True)
class Sample:
    """One text. target: what follows the prompt, where the file says so."""

    prompt: str
    target: str = ""


def read_samples(file: Path, seed: int) -> list[Sample]:
    """Every text of a file, shuffled.

    A file whose first line is a JSON object holds one on every line, with "prompt" (or "text", or
    "turns", of which the first counts) and maybe "target". Any other file holds one text a line,
    in which `\\n` stands for a line break. Raises PromptError for a file with nothing usable.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise PromptError(f"cannot read the data from {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text: data to train on must be") from None
    lines = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if lines and lines[0][1].lstrip().startswith("{"):
        samples = [_from_json(line, f"line {at} of {file}") for at, line in lines]
    else:
        samples = [Sample(line.rstrip("\r").replace("\\n", "\n")) for _, line in lines]
    if not samples:
        raise PromptError(f"{file} has nothing to train on: write one text a line")
    random.Random(seed).shuffle(samples)
    return samples


def digest(file: Path) -> str:
    """What tells this file's contents from others'."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _from_json(line: str, where: str) -> Sample:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptError(f"{where} is not JSON: each line must be an object") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} must be an object with "prompt" or "text"')
    turns = entry.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = entry.get("prompt", entry.get("text", first))
    target = entry.get("target", "")
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(target, str):
        raise PromptError(f'{where} needs "prompt" or "text", a string, and "target" must be one')
    return Sample(prompt, target)
