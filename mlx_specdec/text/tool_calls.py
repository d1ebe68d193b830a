"""Readers of tool calls, which undo what chat templates do to arguments.

A string is written as the table says. Templates write all other values as JSON, and some older ones
write them as Python does: True, None, ['a'].

| formats                                                | a string in a call                      |
|--------------------------------------------------------|-----------------------------------------|
| json_tools, llama3_json, mistral, granite,             | JSON                                    |
| phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2,    |                                         |
| harmony                                                |                                         |
| qwen3_coder                                            | as it is, between two line breaks       |
| seed_oss, glm47, laguna, longcat, minimax_m2,          | as it is                                |
| muse_spark                                             |                                         |
| minicpm5                                               | as it is, or as it is in CDATA if it    |
|                                                        | contains `<`, `&` or a line break       |
| gemma4, function_gemma                                 | as it is, between two tokens for quotes |
| pythonic                                               | a string of Python; older templates put |
|                                                        | quotes around the string as it is       |

No template escapes end tags. An end tag ends a value only if the text after it continues the call
or ends it. Strings without quotes look like other values, so the tool's schema decides: a text is
read as JSON if the schema admits a value of this type, and is a string otherwise."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .tool_values import (
    DECODER,
    Schema,
    kinds_of,
    object_of,
    sendable,
    string_of,
    unquoted,
    value_of,
)

JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
SPACE = re.compile(r"\s*")
QUOTED = rf"""{JSON_STRING.pattern}|'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
"""Matches a string of Python."""


@dataclass(frozen=True)
class Reading:
    """The result of reading a section of calls.

    Attributes:
        calls: The calls, each with "name", "arguments" and, if the model gives one, "id".
        rest: The text after the calls, or the complete text if there are no calls.
        open: Whether the text may end within a value, so that the section goes on.
    """

    calls: Sequence[Mapping[str, Any]] = ()
    rest: str = ""
    open: bool = False


class CallReader(Protocol):
    def read(self, text: str, tools: Sequence[Any]) -> Reading:
        """Read a section of calls.

        Args:
            text: The text after the begin marker, up to the end marker or the end of the answer.
            tools: The tools, in the format of chat templates.
        """


class OpenEndError(ValueError):
    """A text ends within a value."""


@dataclass(frozen=True)
class JsonCalls:
    """Reads calls whose arguments are JSON.

    Attributes:
        marks: The markers around and between calls.
        head: Matches the text before arguments, with the groups "name" and optionally "id", if the
            name of a call is not part of the JSON.
    """

    marks: Sequence[str] = ()
    head: re.Pattern[str] | None = None

    def read(self, text: str, tools: Sequence[Any]) -> Reading:
        marks = "|".join([*map(re.escape, self.marks), r"[\s,;`\[\]}]"])
        between = re.compile(f"(?:{marks})*+")
        calls: list[Mapping[str, Any]] = []
        after, place = 0, between.match(text).end()  # type: ignore[union-attr]
        while place < len(text):
            try:
                call, after = self._call(text, place)
            except (ValueError, RecursionError):
                rest = text[after:]
                return Reading(calls, rest, '"' in JSON_STRING.sub("", rest))
            calls.append(call)
            place = between.match(text, after).end()  # type: ignore[union-attr]
        return Reading(calls, "" if calls else text)

    def _call(self, text: str, place: int) -> tuple[Mapping[str, Any], int]:
        """Return the call at a place, and the place after it. Raises ValueError or
        RecursionError."""
        head = self.head.match(text, place) if self.head is not None else None
        if head is not None:
            value, after = DECODER.raw_decode(text, head.end())
            return {**head.groupdict(), "arguments": sendable(object_of(value))}, after
        value, after = DECODER.raw_decode(text, place)
        called = object_of(value)
        name, arguments = called.get("name"), called.get("arguments", called.get("parameters"))
        if isinstance(arguments, str):
            arguments = DECODER.decode(arguments)
        if not isinstance(name, str):
            raise ValueError(f"no call: {value!r:.80}")
        arguments = sendable(object_of(arguments))
        return {"name": name, "arguments": arguments, "id": called.get("id")}, after


@dataclass(frozen=True)
class TaggedCalls:
    """Reads calls whose arguments are values between tags.

    Attributes:
        begin: The begin marker of a section.
        end: The end marker of a section.
        call: A regular expression for the text before the arguments of a call, with the group
            "name".
        value: A regular expression for the text before a value, with the group "name".
        value_end: The tag after a value.
        call_end: The tag after the arguments, or "" if the end marker is this tag.
        lines: Whether templates put a line break before and after a value.
    """

    begin: str
    end: str
    call: str
    value: str
    value_end: str
    call_end: str = ""
    lines: bool = False
    _call: re.Pattern[str] = field(init=False)
    _value: re.Pattern[str] = field(init=False)
    _value_end: re.Pattern[str] = field(init=False)
    _data_end: re.Pattern[str] = field(init=False)
    _call_end: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        last = rf"{re.escape(self.end)}\Z"
        if self.call_end:
            further = self.call.replace("?P<name>", "?:")
            last = rf"{re.escape(self.call_end)}\s*+(?:(?={further})|(?:{last})?\Z)"
        value = self.value.replace("?P<name>", "?:")
        value_end = rf"{re.escape(self.value_end)}\s*+(?={value}|{last})"
        for name, pattern in (
            ("_call", self.call),
            ("_value", rf"{self.value}(?P<data>\s*<!\[CDATA\[)?"),
            ("_value_end", value_end),
            ("_data_end", rf"\]\]>\s*{value_end}"),
            ("_call_end", last),
        ):
            object.__setattr__(self, name, re.compile(pattern, re.DOTALL))

    def read(self, text: str, tools: Sequence[Any]) -> Reading:
        if text.lstrip().startswith(("{", "[")):
            return JsonCalls((self.end,)).read(text, tools)
        calls: list[Mapping[str, Any]] = []
        place = 0
        try:
            while place < len(text) or not calls:
                call, place = self._read_call(text, place, tools)
                calls.append(call)
        except ValueError as error:
            return Reading((), text, isinstance(error, OpenEndError))
        # The end of a call within a value, such as a page about this format, is not the end.
        values = [value for call in calls for value in call["arguments"].values()]
        texts = [value for value in values if isinstance(value, str)]
        return Reading(calls, "", any(one.count(self.begin) > one.count(self.end) for one in texts))

    def _read_call(
        self, text: str, place: int, tools: Sequence[Any]
    ) -> tuple[Mapping[str, Any], int]:
        """Return the call at a place, and the place after it. Raises ValueError."""
        head = self._call.match(text, SPACE.match(text, place).end())  # type: ignore[union-attr]
        if head is None:
            raise ValueError("no call")
        name, place = _name(head), head.end()
        parameters, arguments = _parameters(tools, name), {}
        properties = parameters.get("properties") or {}
        while (opened := self._value.match(text, place)) is not None:
            ends = self._value_end if opened["data"] is None else self._data_end
            end = ends.search(text, opened.end())
            if end is None:
                raise OpenEndError
            value, place = text[opened.end() : end.start()], end.end()
            if self.lines:
                value = value.removeprefix("\n").removesuffix("\n")
            key = _name(opened)
            arguments[key] = value_of(value, kinds_of(properties.get(key), parameters))
        closed = self._call_end.match(text, place)
        if closed is None:
            raise ValueError("no end of the call")
        return {"name": name, "arguments": arguments}, closed.end()


def _name(found: re.Match[str]) -> str:
    """Return the name in a match, without quotes."""
    return found["name"].strip().strip("\"'")


def _parameters(tools: Sequence[Any], name: str) -> Schema:
    """Return the parameters of a tool, or {} for an unknown tool."""
    functions = (tool["function"] for tool in tools)
    return next((one.get("parameters") or {} for one in functions if one["name"] == name), {})


@dataclass
class Cursor:
    """A place in a text that is read from left to right."""

    text: str
    at: int = 0

    def take(self, pattern: str) -> re.Match[str] | None:
        """Pass the text that matches a regular expression, and return the match or None."""
        found = re.compile(pattern, re.DOTALL).match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return found

    def until(self, pattern: str) -> str:
        """Pass the text up to the end of the first match of a regular expression, and return the
        text before the match. Raises OpenEndError if there is no match."""
        found = re.compile(pattern, re.DOTALL).search(self.text, self.at)
        if found is None:
            raise OpenEndError
        begin, self.at = self.at, found.end()
        return self.text[begin : found.start()]

    def need(self, pattern: str) -> re.Match[str]:
        """As `take`. Raises ValueError if the text does not match."""
        if (found := self.take(pattern)) is None:
            raise ValueError(f"unexpected: {self.text[self.at : self.at + 40]!r}")
        return found


@dataclass(frozen=True)
class QuotedCalls(ABC):
    """Reads calls that look like code, in which strings have quotes. end: The end marker."""

    end: str

    def read(self, text: str, tools: Sequence[Any]) -> Reading:
        try:
            return Reading(self.calls(Cursor(text)))
        except (ValueError, RecursionError) as error:
            return Reading((), text, isinstance(error, OpenEndError))

    @abstractmethod
    def calls(self, cursor: Cursor) -> list[Mapping[str, Any]]:
        """Return the calls of a section. Raises ValueError or RecursionError."""

    def ended(self, cursor: Cursor) -> bool:
        """Return whether only the end marker is left."""
        return cursor.take(rf"\s*(?:{re.escape(self.end)})?\Z") is not None


@dataclass(frozen=True)
class GemmaCalls(QuotedCalls):
    """Reads calls of Gemma, such as `call:get{city:<escape>Bonn<escape>,days:[1,2]}`. quote: The
    token around strings."""

    quote: str

    def calls(self, cursor: Cursor) -> list[Mapping[str, Any]]:
        calls: list[Mapping[str, Any]] = []
        while not calls or not self.ended(cursor):
            name = cursor.need(r"[\s,]*call:(?P<name>[\w.-]+)\s*(?=\{)")["name"]
            calls.append({"name": name, "arguments": self._value(cursor)})
        return calls

    def _value(self, cursor: Cursor) -> Any:
        quote = re.escape(self.quote)
        if cursor.take(quote) is not None:
            return cursor.until(rf"{quote}(?=\s*[,}}\]])")
        if cursor.take(r"\{\s*") is not None:
            value = {}
            while cursor.take(r"\s*\}") is None:
                key = cursor.need(rf"(?:{quote})?([^:{{}}]+?)(?:{quote})?\s*:\s*")[1]
                value[key] = self._value(cursor)
                cursor.take(r"\s*,\s*")
            return value
        if cursor.take(r"\[\s*") is not None:
            items = []
            while cursor.take(r"\s*\]") is None:
                items.append(self._value(cursor))
                cursor.take(r"\s*,\s*")
            return items
        return unquoted(cursor.need(rf"{JSON_STRING.pattern}|[^,{{}}\[\]]+")[0].strip())


@dataclass(frozen=True)
class PythonCalls(QuotedCalls):
    """Reads a list of calls in Python, such as `[get(city="Bonn", days=[1, 2])]`."""

    def calls(self, cursor: Cursor) -> list[Mapping[str, Any]]:
        calls: list[Mapping[str, Any]] = []
        cursor.need(r"\s*\[\s*")
        while not calls or cursor.take(r"\s*\]") is None:
            name = cursor.need(r"(?P<name>[\w.-]+)\(\s*")["name"]
            arguments = {}
            while cursor.take(r"\s*\)") is None:
                key = cursor.need(r"([^\s=,()]+)\s*=\s*")[1]
                arguments[key] = self._value(cursor)
                cursor.take(r"\s*,\s*")
            calls.append({"name": name, "arguments": arguments})
            cursor.take(r"\s*,\s*")
        if not self.ended(cursor):
            raise ValueError("text after the calls")
        return calls

    def _value(self, cursor: Cursor) -> Any:
        opened = cursor.text[cursor.at : cursor.at + 1]
        if opened in ("'", '"'):
            if text := cursor.take(rf"(?:{QUOTED})(?=\s*[,)])"):
                return string_of(text[0])
            # Older templates write the text as it is.
            cursor.need(opened)
            return cursor.until(rf"{opened}(?=\s*(?:,\s*[^\s=,()]+\s*=|\)\s*[,\]]))")
        if opened in ("[", "{"):
            begin, depth = cursor.at, 0
            while cursor.at == begin or depth:
                cursor.take(rf"(?:{QUOTED}|[^\[\]{{}}\"'])*+")
                if cursor.take("[\"']") is not None:
                    raise OpenEndError
                token = cursor.need(r"[\[\]{}]")[0]
                depth += 1 if token in "[{" else -1
            value = unquoted(cursor.text[begin : cursor.at])
            if isinstance(value, str):
                raise ValueError(f"neither JSON nor Python: {value:.80}")
            return value
        return unquoted(cursor.need(r"[^,()\[\]{}]+")[0].strip())
