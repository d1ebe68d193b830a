"""A text on its way -> what of it is said, what is thought, and which tools are called.

In whatever pieces a text comes, all that is told of it is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text.markers import CallFormat, Markers
from ..text.stream import overlap
from .calls import Section
from .events import Call, Event, Kind, Text


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
