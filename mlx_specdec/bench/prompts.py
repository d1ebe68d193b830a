"""Prompt files: one prompt a line, or JSON lines as MT-bench and Spec-Bench have them.

Knows the two formats. Knows no tokenizer and no model.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import PromptError


@dataclass(frozen=True)
class Prompt:
    """What is asked: `turns` one after another, mostly one; category: a name to report under."""

    turns: tuple[str, ...]
    category: str | None = None


def read_prompts(file: Path, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, all if None; empty lines do not count.

    A file whose first line is a JSON object holds one on every line, with "prompt" (a string) or
    "turns" (a list of strings) and maybe "category"; other entries are ignored. Any other file
    holds one prompt a line, in which `\\n` stands for a line break. Raises PromptError.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise PromptError(f"cannot read the prompts from {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text: prompts must be") from None
    # splitlines() would also cut at U+2028 and form feeds, which prompts may contain.
    numbered = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    numbered = numbered[:limit]
    if not numbered:
        raise PromptError(f"{file} has no prompts: write one a line")
    if not numbered[0][1].lstrip().startswith("{"):
        return [Prompt((line.rstrip("\r").replace("\\n", "\n"),)) for _, line in numbered]
    return [_from_json(line, f"line {at} of {file}") for at, line in numbered]


def _from_json(line: str, where: str) -> Prompt:
    try:
        entry: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as problem:
        reason = problem.msg if isinstance(problem, json.JSONDecodeError) else "nested too deeply"
        raise PromptError(f"{where} is not JSON ({reason}): each line must be an object") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} must be an object with "prompt" or "turns"')
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise PromptError(f'the "category" in {where} must be a string')
    return Prompt(_turns(entry, where), category or None)


def _turns(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    if ("prompt" in entry) == ("turns" in entry):
        raise PromptError(f'{where} must have either "prompt" or "turns"')
    turns: Any = [entry["prompt"]] if "prompt" in entry else entry["turns"]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not turns:
        raise PromptError(f'the "turns" in {where} must be a list of strings')
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise PromptError(f"{where} has a prompt that is empty or no string: give some text")
    return tuple(turns)
