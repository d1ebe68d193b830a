"""Streaming readers of completions: they find content, reasoning and tool calls in a text."""

import json
import math
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from ..text.markers import CHANNEL, CONSTRAIN, MESSAGE, MESSAGE_ENDS, START, Markers, ToolFormat
from ..text.thoughts import overlap
from ..text.tool_calls import ParsedCalls, arguments_of, parse_calls

TextKind = Literal["content", "reasoning"]
Kind = TextKind | Literal["call"]
MOST_BARE = 64
"""Characters after which it is certain whether an answer begins with a call without a marker."""


@dataclass(frozen=True)
class Event:
    """A piece of content or of reasoning, or a complete tool call.

    Attributes:
        text: The piece, or the arguments of the call in JSON.
        index: Number of earlier calls in the completion.
        id: A unique id of the call.
        name: The name of the called tool.
    """

    kind: Kind
    text: str
    index: int = 0
    id: str = ""
    name: str = ""


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """Join consecutive texts of one kind."""
    for kind, group in groupby(events, lambda event: event.kind):
        if kind == "call":
            yield from group
        else:
            yield Event(kind, "".join(event.text for event in group))


def by_kind(events: Sequence[Event]) -> tuple[str, str, list[Event]]:
    """Return the content, the reasoning and the calls in events."""
    content, reasoning = (
        "".join(event.text for event in events if event.kind == kind)
        for kind in ("content", "reasoning")
    )
    return content, reasoning, [event for event in events if event.kind == "call"]


@dataclass
class Reader:
    """A reader of one choice.

    Attributes:
        tools: The tools, in the format of chat templates.
        thinking: Whether the text begins within reasoning.
        most_calls: Largest number of calls. Further calls are dropped.
        header: Whether the text begins within the header of a message in a channel, until that
            header has ended.
        section: The marker that began the current section of calls, or None. The end of a section
            may take long to read.
        count: Number of calls so far.
    """

    markers: Markers = field(default_factory=Markers)
    tools: Sequence[Any] = ()
    thinking: bool = False
    most_calls: int | None = None
    header: bool = False
    section: str | None = None
    count: int = 0
    _text: str = ""

    def __post_init__(self) -> None:
        # White space next to a marker belongs to the marker.
        self._at_mark = self.thinking
        # Whether a call without a marker may begin, because there is no content so far.
        self._fresh = True
        # The length of the section that was searched for its end.
        self._searched = 0
        # What was read up to the first end marker that may be part of a value, and its end.
        self._first: tuple[ParsedCalls, int] | None = None

    def read(self, text: str | None) -> list[Event]:
        """Return the events of the next piece of text. None is the end of the text."""
        self._text += text or ""
        events: list[Event] = []
        self._read(events, text is None)
        most = math.inf if self.most_calls is None else self.most_calls
        return [event for event in events if event.text and event.index < most]

    def _read(self, events: list[Event], over: bool) -> None:
        """Add the events that are certain. over: Whether the completion has ended."""
        while (self._outside if self.section is None else self._inside)(events, over):
            pass

    def _inside(self, events: list[Event], over: bool) -> bool:
        """Read a section of calls, and return whether it has ended."""
        calls, text = self.markers.calls, self._text
        assert calls is not None, "a section has a format"
        end = calls.end
        while end and (place := text.find(end, self._searched)) >= 0:
            self._searched = place = place + len(end)
            reading = parse_calls(calls, text[:place], self.tools)
            if not reading.open:
                self._close(events, calls, reading, place)
                return True
            self._first = self._first or (reading, place)
        if over:
            reading, place = parse_calls(calls, text, self.tools), len(text)
            if self._first is not None and (reading.open or reading.rest):
                reading, place = self._first
            self._close(events, calls, reading, place)
        else:
            self._searched = max(self._searched, len(text) - len(end))
        return over

    def _close(
        self, events: list[Event], calls: ToolFormat, reading: ParsedCalls, place: int
    ) -> None:
        """Add the events of a section. place: The end of the section."""
        for call in reading.calls:
            id, text = call.get("id"), json.dumps(call["arguments"], ensure_ascii=False)
            id = id if isinstance(id, str) else f"call_{uuid.uuid4().hex}"
            events.append(Event("call", text, self.count, id, call["name"]))
            self.count += 1
        rest = reading.rest.removesuffix(calls.end).strip()
        rest = rest if reading.calls else f"{self.section}{reading.rest}"
        events.append(Event("content", rest))
        self._text, self.section, self._at_mark = self._text[place:], None, True

    def _outside(self, events: list[Event], over: bool) -> bool:
        """Read up to the next marker, and return whether there was a marker."""
        calls = self.markers.calls
        if calls is not None and calls.bare and self._fresh and not self.thinking:
            begun = _begun_bare(self._text, calls.bare, over=over)
            if begun is None:
                return False
            if begun:
                rest = self._text.lstrip()
                space, self._text = self._text[: -len(rest)], rest
                self._open(space)
                return True
        marks = self._marks()
        text = self._text.lstrip() if self._at_mark else self._text
        places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
        place, mark = min(places, default=(0, ""))
        kind: Kind = "reasoning" if self.thinking else "content"
        if mark:
            self._write(events, kind, text[:place].rstrip())
            self._text, self._at_mark = text[place + len(mark) :], True
            self.thinking = marks[mark] == "reasoning"
            if marks[mark] == "call":
                self._open(mark)
            return True
        sure = len(text)
        if marks and not over:
            # A marker may begin at the end of the text, after white space that belongs to it.
            sure = len(text[: sure - max(overlap(text, mark) for mark in marks)].rstrip())
        self._write(events, kind, text[:sure])
        self._text, self._at_mark = text[sure:], self._at_mark and sure == 0
        return False

    def _write(self, events: list[Event], kind: Kind, text: str) -> None:
        events.append(Event(kind, text))
        self._fresh = self._fresh and (kind == "reasoning" or not text.strip())

    def _open(self, mark: str) -> None:
        self.section, self._searched, self._first, self._fresh = mark, 0, None, False

    def _marks(self) -> Mapping[str, Kind]:
        """Return the markers that may come next, each with the kind of event after it."""
        think, calls = self.markers.think, self.markers.calls
        if self.thinking:
            return dict.fromkeys([*think][1:], "content")
        marks: dict[str, Kind] = dict.fromkeys([*think][:1], "reasoning")
        if calls is not None:
            marks |= dict.fromkeys((calls.begin, *calls.also), "call")
        return marks


def _begun_bare(text: str, beginnings: Iterable[str], *, over: bool) -> bool | None:
    """Return whether a text begins a call without a marker, or None if this is not certain yet.
    over: Whether the text is complete."""
    compact = "".join(text.lstrip()[:MOST_BARE].split())
    if any(compact.startswith(beginning) for beginning in beginnings):
        return True
    undecided = compact and not over and len(text.lstrip()) < MOST_BARE
    may_begin = any(beginning.startswith(compact) for beginning in beginnings)
    return None if undecided and may_begin else False


# Messages in channels, OpenAI's Harmony format.
MessageKind = Literal["content", "reasoning", "arguments", "nothing"]
CHANNEL_KINDS: Mapping[str, TextKind] = {"analysis": "reasoning"}
"""Kinds of the messages in a channel, by the channel's name. All other channels hold content."""
ROLE = re.compile(rf"{re.escape(START)}\s*(\w+)")
CHANNEL_NAME = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)")
BEGINNINGS = (START, CHANNEL, MESSAGE, CONSTRAIN, "to=")
"""Possible beginnings of a header, or of the rest of a header."""
ENDS = (*MESSAGE_ENDS, START, CHANNEL)
"""Texts that end a message. The last two begin the next header."""


@dataclass
class ChannelReader(Reader):
    """A reader of the messages of one choice."""

    def __post_init__(self) -> None:
        self._kind: MessageKind | None = None
        if not self.header:
            self._kind = "reasoning" if self.thinking else "content"
        # The name of the called tool.
        self._called = ""

    def _read(self, events: list[Event], over: bool) -> None:
        while (self._header if self._kind is None else self._message)(events, over):
            pass

    def _header(self, events: list[Event], over: bool) -> bool:
        """Read a header, and return whether it has ended."""
        text = self._text.lstrip()
        begins = not over and any(beginning.startswith(text) for beginning in BEGINNINGS)
        if self.header and not (begins or text.startswith(BEGINNINGS)):
            # A model that was trained on another format answers without a header.
            self._kind, self.header = "content", False
            return True
        header, found, rest = self._text.partition(MESSAGE)
        if not found:
            return False
        self._text, self.header, self._kind = rest, False, self._kind_of(header)
        if self._kind == "arguments":
            self._called = RECIPIENT.findall(header)[-1]
        return True

    def _kind_of(self, header: str) -> MessageKind:
        """Return the kind of the message with this header."""
        role, channel = ROLE.search(header), CHANNEL_NAME.search(header)
        if role is not None and role[1] != "assistant":
            return "nothing"  # The model invents a message of the user or of a tool.
        if self.markers.calls is not None and RECIPIENT.search(header):
            return "arguments"
        return CHANNEL_KINDS.get(channel[1], "content") if channel is not None else "content"

    def _message(self, events: list[Event], over: bool) -> bool:
        """Read a message or a piece of it, and return whether it has ended."""
        places = [(place, end) for end in ENDS if (place := self._text.find(end)) >= 0]
        place, end = min(places, default=(len(self._text), ""))
        if not end and not over:
            if self._kind == "arguments":
                return False
            place -= max(overlap(self._text, marker) for marker in ENDS)
        text, self._text = self._text[:place], self._text[place:]
        if self._kind == "arguments":
            events += self._call(text)
        elif self._kind in ("content", "reasoning"):
            events.append(Event(self._kind, text))
        if end:
            self._kind = None
            self._text = self._text if end in (START, CHANNEL) else self._text[len(end) :]
        return bool(end)

    def _call(self, text: str) -> list[Event]:
        """Return the call with these arguments, or their text as content if they are not JSON."""
        try:
            arguments = json.dumps(arguments_of(text), ensure_ascii=False)
        except (ValueError, RecursionError):
            return [Event("content", text)]
        index, self.count = self.count, self.count + 1
        return [Event("call", arguments, index, f"call_{uuid.uuid4().hex}", self._called)]
