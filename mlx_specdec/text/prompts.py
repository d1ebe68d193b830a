"""Files of prompts: one a line, or JSON lines as MT-bench and Spec-Bench have them."""

from __future__ import annotations

import json
from collections import Counter
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
    """The first `limit` prompts of a file, all if None.

    Objects have "prompt" (a string) or "turns" (a list of strings) and maybe "category"; other
    entries are ignored. Raises PromptError, as `read_lines` does.
    """
    lines = read_lines(file, "prompts", limit)
    if not lines:
        raise PromptError(f"{file} has no prompts: write one a line")
    return [
        Prompt((line,)) if isinstance(line, str) else _from_object(line, where)
        for where, line in lines
    ]


def read_lines(
    file: Path, what: str, limit: int | None = None
) -> list[tuple[str, str | dict[str, Any]]]:
    """The first `limit` lines of a file, each with its place; empty lines do not count.

    A file whose first line is a JSON object holds one on every line. Any other file holds a text on
    every line, in which `\\n` stands for a line break. Raises PromptError; what: the contents, in a
    word.
    """
    try:
        if file.is_char_device() or file.is_block_device():
            raise PromptError(f"{file} is a device, maybe endless: save the {what} in a file")
        text = file.read_text(encoding="utf-8-sig")
    except OSError as problem:
        raise PromptError(f"cannot read the {what} from {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise PromptError(f"{file} is not UTF-8 text: {what} must be") from None
    # splitlines() would also cut at U+2028 and form feeds, which prompts may contain.
    numbered = [(at, line) for at, line in enumerate(text.split("\n"), start=1) if line.strip()]
    lines = [(f"line {at} of {file}", line) for at, line in numbered[:limit]]
    if lines and lines[0][1].lstrip().startswith("{"):
        return [(where, json_object(line, where)) for where, line in lines]
    return [(where, line.rstrip("\r").replace("\\n", "\n")) for where, line in lines]


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object that a line of JSON holds. Raises PromptError for anything else, and for an object
    that says something twice; where: the line's name."""
    try:
        entry: Any = json.loads(line, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as problem:
        reason = getattr(problem, "msg", "nested too deeply, or a number with too many digits")
        raise PromptError(f"{where} is not JSON ({reason}): each line must be an object") from None
    if not isinstance(entry, dict):
        raise PromptError(f'{where} must be an object with "prompt"')
    return entry


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entry = dict(pairs)
    if len(entry) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise json.JSONDecodeError(f"it has {json.dumps(twice)} twice", "", 0)
    return entry


def _from_object(entry: dict[str, Any], where: str) -> Prompt:
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
