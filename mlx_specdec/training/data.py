"""A file of texts -> pairs of prompt and continuation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError
from ..text.prompts import read_lines


@dataclass(frozen=True)
class Sample:
    """One text. target: what follows the prompt, where the file says so."""

    prompt: str
    target: str = ""


def read_samples(file: Path, seed: int) -> list[Sample]:
    """Every text of a file, shuffled.

    Objects have "prompt" (or "text", or "turns", of which the first counts) and maybe "target".
    Raises PromptError for a file with nothing usable, and as `prompts.read_lines` does.
    """
    samples = [
        Sample(line) if isinstance(line, str) else _from_object(line, where)
        for where, line in read_lines(file, "data")
    ]
    if not samples:
        raise PromptError(f"{file} has nothing to train on: write one text a line")
    random.Random(seed).shuffle(samples)
    return samples


def _from_object(entry: dict[str, Any], where: str) -> Sample:
    turns = entry.get("turns")
    first = turns[0] if isinstance(turns, list) and turns else None
    prompt = entry.get("prompt", entry.get("text", first))
    target = entry.get("target", "")
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(target, str):
        raise PromptError(f'{where} needs "prompt" or "text", a string, and "target" must be one')
    return Sample(prompt, target)
