"""Reads the output of a model that writes messages in channels, OpenAI's Harmony format."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..text.stream import overlap
from ..text.tool_formats import CHANNEL, CONSTRAIN, MESSAGE, MESSAGE_ENDS, START
from ..text.tool_values import arguments_of
from .events import Event, Reader, TextKind, new_id

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
    """A reader of the messages of one choice. header: Whether the text begins within the header of
    a message."""

    header: bool = True

    def __post_init__(self) -> None:
        self._kind: MessageKind | None = None
        if not self.header:
            self._kind = "reasoning" if self.thinking else "content"
        self._begun = not self.header
        # The name of the called tool.
        self._called = ""

    def _read(self, events: list[Event], over: bool) -> None:
        while (self._header if self._kind is None else self._message)(events, over):
            pass

    def _header(self, events: list[Event], over: bool) -> bool:
        """Read a header, and return whether it has ended."""
        if not self._begun and not _may_begin(self._text.lstrip(), over=over):
            # A model that was trained on another format answers without a header.
            self._kind, self._begun = "content", True
            return True
        header, found, rest = self._text.partition(MESSAGE)
        if not found:
            return False
        self._text, self._begun, self._kind = rest, True, self._kind_of(header)
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
        self.count += 1
        return [Event("call", arguments, self.count - 1, new_id(), self._called)]


def _may_begin(text: str, *, over: bool) -> bool:
    """Return whether a text begins a header, or could begin one if more text followed. over:
    Whether the text is complete."""
    if text.startswith(BEGINNINGS):
        return True
    return not over and any(beginning.startswith(text) for beginning in BEGINNINGS)
