"""What a line of a file of prompts asks for, checked, or why nothing can be made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ..errors import OptionError, PromptError, SpecdecError
from ..options import Options
from ..text.chat import Messages
from ..text.prompts import json_object
from .lines import LONGEST, Line

OWN = ("max_tokens", "seed", "temperature", "top_p", "stop")
"""Settings that a line may have for itself."""
COMMON = frozenset(one.name for one in fields(Options)) - {*OWN}


@dataclass(frozen=True)
class Asked:
    """One prompt of a file. id: the line's own name, where it has one. error: why there is no
    prompt; one sentence."""

    line: int
    prompt: str | Messages
    options: Options
    id: str | int | None = None
    error: str | None = None

    def record(self, **told: Any) -> dict[str, Any]:
        """What is written for this line."""
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, **told}


def ask(line: Line, options: Options, *, as_json: bool) -> Asked:
    """What a line asks for; options: of the lines that have none of their own.

    In a line of text `\\n` stands for a line break.
    """
    asked = Asked(line.number, "", options)
    if line.text is None:
        return replace(asked, error=f"the line has more than {LONGEST} bytes: shorten it")
    if not as_json:
        return replace(asked, prompt=line.text.replace("\\n", "\n"))
    try:
        entry = json_object(line.text, "the line")
        asked = replace(asked, id=_id(entry))
        return replace(asked, prompt=_prompt(entry), options=_options(entry, options))
    except SpecdecError as problem:
        return replace(asked, error=str(problem))


def _id(entry: Mapping[str, Any]) -> str | int | None:
    given = entry.get("id")
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        return given
    return _text("id", given)


def _prompt(entry: Mapping[str, Any]) -> str | Messages:
    if ("prompt" in entry) == ("messages" in entry):
        raise PromptError('the line must have either "prompt" or "messages"')
    if "prompt" in entry:
        prompt = _text("prompt", entry["prompt"])
        if not prompt.strip():
            raise PromptError("the prompt is empty: give some text")
        return prompt
    messages = entry["messages"]
    if not isinstance(messages, list) or not messages:
        raise PromptError('"messages" must be a list of {"role": ..., "content": ...}')
    return [_message(each) for each in messages]


def _message(given: object) -> dict[str, str]:
    if not isinstance(given, dict) or not given.keys() >= {"role", "content"}:
        raise PromptError('each of "messages" must be {"role": ..., "content": ...}')
    return {name: _text(name, value) for name, value in given.items()}


def _options(entry: Mapping[str, Any], options: Options) -> Options:
    common = sorted(COMMON & entry.keys())
    if common:
        raise OptionError(
            f'"{common[0]}" is one for all lines: leave it out; a line may have {", ".join(OWN)}'
        )
    own = {name: entry[name] for name in OWN if entry.get(name) is not None}
    for name, value in own.items():
        if isinstance(value, bool):
            raise OptionError(f'"{name}" cannot be {str(value).lower()}')
    if "stop" in own:
        stops = own["stop"] if isinstance(own["stop"], list) else [own["stop"]]
        own["stop"] = [_text("stop", each) for each in stops]
    return replace(options, **own)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise PromptError(f'"{name}" must be a string, not {value!r:.80}')
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f'"{name}" has half a character in it, a lone surrogate') from None
    return value
