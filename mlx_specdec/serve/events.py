"""What a text is told in: words, thoughts, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

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
