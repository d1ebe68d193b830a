"""What a text is told in: words, thoughts, and calls of tools."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..text.markers import CallFormat, Markers
from ..text.stream import overlap

Kind = Literal["content", "reasoning"]


@dataclass(frozen=True)
class Text:
    """Something said or thought."""

    kind: Kind
    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a call; calls are counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """A part of a call's arguments, which are JSON together."""

    index: int
    text: str


Event = Text | Call | Arguments


def texts_of(events: Iterable[Event], kind: Kind) -> str:
    """All that was said, or thought."""
    return "".join(each.text for each in events if isinstance(each, Text) and each.kind == kind)


def calls_of(events: Sequence[Event]) -> list[tuple[Call, str]]:
    """All calls, each with its arguments."""
    arguments: dict[int, str] = {}
    for each in events:
        if isinstance(each, Arguments):
            arguments[each.index] = arguments.get(each.index, "") + each.text
    calls = [each for each in events if isinstance(each, Call)]
    return [(each, arguments.get(each.index, "")) for each in calls]


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


class Reader:
    """Reads one text.

    calls: how tools are called; None where none may be. tools: as templates take them. thinking:
    the text begins within a thought. most_calls: further ones are left out.
    """

    def __init__(
        self,
        markers: Markers,
        calls: CallFormat | None = None,
        tools: Sequence[Any] = (),
        *,
        thinking: bool = False,
        most_calls: int | None = None,
    ) -> None:
        self._markers = markers
        self._calls = calls
        self._tools = tools
        self._thinking = thinking
        self._most_calls = most_calls
        # White space at marks belongs to them; at the ends of a text it stays.
        self._at_mark = thinking
        self._text = ""
        self._section: Section | None = None
        self._count = 0

    @property
    def called(self) -> bool:
        """Whether a tool has been called."""
        return self._count > 0

    @property
    def inside(self) -> bool:
        """Whether a section of calls has begun, which may take long to read at its end."""
        return self._section is not None

    def push(self, text: str) -> list[Event]:
        """What a further piece makes certain."""
        self._text += text
        return self._read(over=False)

    def finish(self) -> list[Event]:
        """What was held back."""
        return self._read(over=True)

    def _read(self, *, over: bool) -> list[Event]:
        events: list[Event] = []
        going = True
        while going:
            step = self._outside if self._section is None else self._inside
            going = step(events, over)
        return [each for each in events if self._wanted(each)]

    def _wanted(self, event: Event) -> bool:
        if not isinstance(event, Call) and not event.text:
            return False
        if isinstance(event, Text):
            return True
        return self._most_calls is None or event.index < self._most_calls

    def _inside(self, events: list[Event], over: bool) -> bool:
        """Read on in a section of calls; whether it has ended and something follows."""
        section = self._section
        assert section is not None
        told, rest = section.push(self._text, over=over)
        events += told
        self._count, self._text = section.count, rest or ""
        if rest is not None:
            self._section, self._at_mark = None, True
        return rest is not None

    def _outside(self, events: list[Event], over: bool) -> bool:
        """Read up to the next mark; whether there was one."""
        marks = self._marks()
        text = self._text.lstrip() if self._at_mark else self._text
        place, mark = _first(text, marks)
        kind: Kind = "reasoning" if self._thinking else "content"
        if mark:
            events.append(Text(kind, text[:place].rstrip()))
            self._text, self._at_mark = text[place + len(mark) :], True
            begun = marks[mark]
            self._thinking = begun == "reasoning"
            if isinstance(begun, CallFormat):
                self._section = Section(begun, self._tools, self._count)
            return True
        sure = len(text) if over else _certain(text, marks)
        events.append(Text(kind, text[:sure]))
        self._text, self._at_mark = text[sure:], self._at_mark and sure == 0
        return False

    def _marks(self) -> Mapping[str, Kind | CallFormat]:
        """What may come next, and what begins with it."""
        begin, end = self._markers.think_begin, self._markers.think_end
        if self._thinking:
            return {} if end is None else {end.text: "content"}
        marks: dict[str, Kind | CallFormat] = {}
        if begin is not None:
            marks[begin.text] = "reasoning"
        if self._calls is not None:
            marks[self._calls.begin.text] = self._calls
        return marks


def _first(text: str, marks: Iterable[str]) -> tuple[int, str]:
    """The first of the marks and its place; "" where there is none."""
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(places, default=(0, ""))


def _certain(text: str, marks: Iterable[str]) -> int:
    """How much of a text cannot belong to a mark that follows."""
    held = max((overlap(text, mark) for mark in marks), default=0)
    sure = len(text) - held
    return len(text[:sure].rstrip()) if list(marks) else sure
