"""The calls of tools in a text that comes in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..text.markers import CallFormat
from .events import Arguments, Call, Event, Text

_S, _NAME = r"\s{0,64}+", r'[^"\\]{1,256}+'
_LISTED = rf'\{{{_S}"name"{_S}:{_S}"(?P<listed>{_NAME})"{_S},{_S}"arguments"{_S}:'
HEADS = {
    "json_tools": re.compile(rf"{_LISTED}{_S}(?=\{{)"),
    "kimi_k2": re.compile(
        r"(?<![^\s<>:{}])(?P<id>(?:functions\.)?(?P<name>[^\s<>:{}]{1,256}+):\d{1,16}+)"
        rf"{_S}<\|tool_call_argument_begin\|>{_S}(?=\{{)"
    ),
    "mistral": re.compile(
        rf"(?:(?<![\w-])(?P<name>[\w-]{{1,256}}+){_S}\[ARGS\]|{_LISTED}){_S}(?=\{{)"
    ),
}
"""What stands before arguments that are JSON and can be told as they come, by the parser's name.
A text is searched in linear time: no part is tried at two lengths, and a name begins at the
beginning of a word."""
MOST_HEAD = 1024
"""Characters by which a search goes back, enough for the longest head."""
MOST_PARSED = 1 << 16
"""Maximum characters of a section for mlx-lm's parsers, which may take quadratic time."""


class Section:
    """What stands between the marks of calls. count: of the calls so far, those before included."""

    def __init__(self, calls: CallFormat, tools: Sequence[Any], count: int) -> None:
        self.count = count
        self._calls = calls
        self._tools = tools
        self._before = count
        self._head = HEADS.get(calls.name)
        self._text = ""
        self._at = 0
        self._searched = 0
        self._arguments: _Json | None = None

    def push(self, text: str, *, over: bool) -> tuple[list[Event], str | None]:
        """What a further piece makes certain, and what follows the section; None while it goes on.

        over: nothing more comes.
        """
        self._text += text
        events: list[Event] = []
        while True:
            if self._arguments is not None:
                begin, self._at = self._at, self._arguments.end(self._text, self._at)
                events.append(Arguments(self.count - 1, self._text[begin : self._at]))
                if not self._arguments.over:
                    return events, "" if over else None
                self._arguments = None
            end = self._calls.end.text
            place = self._text.find(end, max(self._at, self._searched - len(end))) if end else -1
            limit = place if place >= 0 else len(self._text)
            begin = max(self._at, self._searched - MOST_HEAD)
            head = self._head.search(self._text, begin, limit) if self._head else None
            self._searched = self._at if head is not None else limit
            if head is not None:
                self._at, self._arguments = head.end(), _Json()
                events.append(self._begin(head.groupdict()))
            elif place >= 0:
                return events + self._rest(limit, end), self._text[place + len(end) :]
            else:
                return events + (self._rest(limit) if over else []), "" if over else None

    def _begin(self, told: Mapping[str, Any]) -> Call:
        id = told.get("id")
        name = told.get("name") or told.get("listed")
        call = Call(self.count, id if isinstance(id, str) else _new_id(), str(name))
        self.count += 1
        return call

    def _rest(self, limit: int, end: str = "") -> list[Event]:
        """The calls of a section that had no head: what mlx-lm's parser makes of it, or the text as
        it is where it makes nothing."""
        if self.count > self._before:
            return []
        text = self._text[:limit]
        try:
            if self._head is not None:
                json.loads(text)
            elif len(text) > MOST_PARSED:
                raise ValueError
            parsed = self._calls.parse(text, list(self._tools))
            calls = [_checked(each) for each in (parsed if isinstance(parsed, list) else [parsed])]
        except Exception:  # each parser fails in its own ways
            return [Text("content", self._calls.begin.text + text + end)]
        events: list[Event] = []
        for call, arguments in calls:
            events += [self._begin(call), Arguments(self.count - 1, arguments)]
        return events


class _Json:
    """Looks for the end of an object that comes in pieces. over: it has been met, or a letter that
    no JSON has there."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def end(self, text: str, at: int) -> int:
        """Up to where the object goes, from `at` on."""
        while at < len(text) and not self.over:
            letter = text[at]
            if self._quoted:
                self._quoted = self._escaped or letter != '"'
                self._escaped = letter == "\\" and not self._escaped
            elif letter == "<":
                self.over = True
                return at
            else:
                self._quoted = letter == '"'
                self._depth += (letter in "{[") - (letter in "}]")
                self.over = self._depth == 0
            at += 1
        return at


def _checked(call: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """A call of mlx-lm's parsers, and its arguments as JSON. Raises what it likes for others."""
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    if not isinstance(call["name"], str):
        raise TypeError
    return call, arguments


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex}"
