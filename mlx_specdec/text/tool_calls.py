"""Parsers of tool calls, which undo what chat templates do to arguments.

A string is written as the table says. Templates write all other values as JSON, and some older ones
write them as Python does: True, None, ['a'].

| formats                                                | a string in a call                      |
|--------------------------------------------------------|-----------------------------------------|
| json_tools, llama3_json, mistral, granite,             | JSON                                    |
| phi4_mini_json, deepseek_v3, deepseek_v31, kimi_k2,    |                                         |
| harmony                                                |                                         |
| qwen3_coder                                            | as it is, between two line breaks       |
| seed_oss, glm47, longcat, minimax_m2,                  | as it is                                |
| muse_spark                                             |                                         |
| minicpm5                                               | as it is, or as it is in CDATA if it    |
|                                                        | contains `<`, `&` or a line break       |
| gemma4, function_gemma                                 | as it is, between two tokens for quotes |
| pythonic                                               | a string of Python; older templates put |
|                                                        | quotes around the string as it is       |

No template escapes end tags. An end tag ends a value only if the text after it continues the call
or ends it. Strings without quotes look like other values, so the tool's schema decides: a text is
read as JSON if the schema admits a value of this type, and is a string otherwise."""

import ast
import codecs
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .markers import ToolFormat

JSON_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}
"""JSON Schema's names of types."""
ANY = frozenset(JSON_TYPES.values())
ESCAPE = re.compile(
    r"\\(?:[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\})"
)
"""Matches an escape sequence of Python. Any other backslash means itself."""
JSON_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
QUOTED = rf"""{JSON_STRING.pattern}|'[^'\\]*+(?:\\.[^'\\]*+)*+'"""
"""Matches a string of Python."""
ParsedCall = Mapping[str, Any]
"""A call: "name", "arguments" and, if the model gives one, "id"."""


def finite(text: str) -> float:
    """Return a number. Raises ValueError for a number that JSON cannot write: one that is too
    large, NaN or Infinity."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"not JSON: {text:.80}")
    return number


DECODER = json.JSONDecoder(strict=False, parse_float=finite, parse_constant=finite)
"""Reads JSON, in which strings may contain control characters such as line breaks: a model means
the character."""


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments in JSON. Raises ValueError or RecursionError."""
    return object_of(sendable(DECODER.decode(text)))


def sendable(value: Any) -> Any:
    """Return a value. Raises ValueError if it contains halves of characters, which UTF-8 lacks."""
    json.dumps(value, ensure_ascii=False).encode()
    return value


def object_of(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"no arguments: {value!r:.80}")
    return value


def kinds_of(schema: object, root: Any, resolved: dict[str, frozenset[str]]) -> frozenset[str]:
    """Return the names of the types that a schema admits.

    Args:
        root: The schema to which references are relative.
        resolved: The types of references, {} before the first one. A reference that is being
            resolved admits all types."""
    if not isinstance(schema, Mapping):
        return ANY
    found = ANY
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in resolved:
            resolved[reference], here = ANY, root
            for part in reference.removeprefix("#/").split("/"):
                here = here.get(part) if isinstance(here, Mapping) else None
            resolved[reference] = kinds_of(here, root, resolved)
        found &= resolved[reference]
    names = schema.get("type", ())
    names = {str(name).lower() for name in (names if isinstance(names, list) else [names])} & ANY
    found &= (names | {"integer"} if "number" in names else names) or ANY
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found &= {JSON_TYPES.get(type(value), "null") for value in values}
    for name in ("anyOf", "oneOf"):
        branches = schema.get(name)
        if isinstance(branches, list) and branches:
            found &= frozenset().union(*(kinds_of(branch, root, resolved) for branch in branches))
    for branch in schema.get("allOf") or ():
        found &= kinds_of(branch, root, resolved)
    return found | {"null"} if schema.get("nullable") is True else found


def value_of(text: str, kinds: frozenset[str]) -> Any:
    """Return the value of a text in a format that writes strings without quotes. kinds: The types
    that the schema admits."""
    value = text if kinds == {"string"} else unquoted(text.strip(), words="string" not in kinds)
    kind = JSON_TYPES[type(value)]
    integral = isinstance(value, float) and value.is_integer() and "integer" in kinds
    return value if kind != "string" and (kind in kinds or integral) else text


def unquoted(text: str, *, words: bool = True) -> Any:
    """Return the value of a text in JSON, or of Python's literals, or the text itself. words:
    Whether Python's literals are read."""
    with contextlib.suppress(ValueError, RecursionError):
        return sendable(DECODER.decode(text))
    if words and (text in ("True", "False", "None") or text.startswith(("[", "{"))):
        with contextlib.suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            value = ast.literal_eval(text)
            # A tuple or a number as a key would become something else in JSON.
            if json.loads(json.dumps(sendable(value), allow_nan=False)) == value:
                return value
    return text


def string_of(literal: str) -> str:
    """Return the value of a literal of JSON or Python, in which control characters mean
    themselves. Raises ValueError."""
    if literal[0] == '"':
        with contextlib.suppress(ValueError):
            return str(sendable(DECODER.decode(literal)))
    # A string of Python.
    text = ESCAPE.sub(lambda found: codecs.decode(found[0], "unicode_escape"), literal[1:-1])
    return str(sendable(text))


@dataclass(frozen=True)
class ParsedCalls:
    """The calls in a section.

    Attributes:
        calls: The calls.
        rest: The text after the calls, or the complete text if there are no calls.
        open: Whether the text may end within a value, so that the section goes on.
    """

    calls: Sequence[ParsedCall] = ()
    rest: str = ""
    open: bool = False


class OpenEndError(ValueError):
    """A text ends within a value."""


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


def parse_calls(format: ToolFormat, text: str, tools: Sequence[Any]) -> ParsedCalls:
    """Parse a section of calls.

    Args:
        text: The text after the begin marker, up to the end marker or the end of the answer.
        tools: The tools, in the format of chat templates.
    """
    cursor, calls = Cursor(text), list[ParsedCall]()
    parse_call = PARSERS.get(format.arguments)
    in_json = format.arguments == "tags" and text.lstrip().startswith(("{", "["))
    if parse_call is None or in_json:
        return _json_calls(format, cursor)
    end = rf"[\s,\]]*(?:{re.escape(format.end)})?\Z"
    try:
        while not calls or cursor.take(end) is None:
            calls.append(parse_call(format, cursor, tools))
    except (ValueError, RecursionError) as error:
        return ParsedCalls((), text, isinstance(error, OpenEndError))
    # The end of a call within a value, such as a page about this format, is not the end.
    texts = [text for call in calls for text in call["arguments"].values() if isinstance(text, str)]
    inside = any(text.count(format.begin) > text.count(format.end) for text in texts)
    return ParsedCalls(calls, "", inside)


def _json_calls(format: ToolFormat, cursor: Cursor) -> ParsedCalls:
    text, calls, after = cursor.text, list[ParsedCall](), 0
    marks = "|".join(map(re.escape, filter(None, (format.begin, format.end, *format.inner))))
    between = rf"(?:{marks}|[\s,;`\[\]}}])*+"
    cursor.take(between)
    while cursor.at < len(text):
        try:
            calls.append(_json_call(format, cursor))
        except (ValueError, RecursionError):
            rest = text[after:]
            return ParsedCalls(calls, rest, '"' in JSON_STRING.sub("", rest))
        after = cursor.at
        cursor.take(between)
    return ParsedCalls(calls, "" if calls else text)


def _json_call(format: ToolFormat, cursor: Cursor) -> ParsedCall:
    head = cursor.take(format.call) if format.call else None
    value, cursor.at = DECODER.raw_decode(cursor.text, cursor.at)
    called = object_of(value)
    if head is not None:
        return {**head.groupdict(), "arguments": sendable(called)}
    name, arguments = called.get("name"), called.get("arguments", called.get("parameters"))
    if isinstance(arguments, str):
        arguments = DECODER.decode(arguments)
    if not isinstance(name, str):
        raise ValueError(f"no call: {called!r:.80}")
    return {"name": name, "arguments": sendable(object_of(arguments)), "id": called.get("id")}


def _tagged_call(format: ToolFormat, cursor: Cursor, tools: Sequence[Any]) -> ParsedCall:
    end = rf"{re.escape(format.end)}\Z"
    if format.call_end:
        further = format.call.replace("?P<name>", "?:")
        end = rf"{re.escape(format.call_end)}\s*+(?:(?={further})|(?:{end})?\Z)"
    another = format.value.replace("?P<name>", "?:")
    value_end = rf"{re.escape(format.value_end)}\s*+(?={another}|{end})"
    name, arguments = _name(cursor.need(rf"\s*{format.call}")), {}
    functions = (tool["function"] for tool in tools)
    found = (one.get("parameters") for one in functions if one["name"] == name)
    parameters = next(found, None) or {}
    properties = parameters.get("properties") or {}
    while (opened := cursor.take(rf"{format.value}(?P<data>\s*<!\[CDATA\[)?")) is not None:
        value = cursor.until(rf"\]\]>\s*{value_end}" if opened["data"] else value_end)
        if format.lines:
            value = value.removeprefix("\n").removesuffix("\n")
        key = _name(opened)
        arguments[key] = value_of(value, kinds_of(properties.get(key), parameters, {}))
    cursor.need(end)
    return {"name": name, "arguments": arguments}


def _name(found: re.Match[str]) -> str:
    """Return the name in a match, without quotes."""
    return found["name"].strip().strip("\"'")


def _entries(
    cursor: Cursor, end: str, key: str, value: Callable[[Cursor], Any]
) -> Iterator[tuple[str, Any]]:
    """Yield keys and values with commas between them, up to the end.

    Args:
        end: A regular expression that matches the end.
        key: A regular expression whose first group is the key.
        value: Reads a value."""
    while cursor.take(end) is None:
        name = cursor.need(key)[1]
        yield name, value(cursor)
        cursor.take(r"\s*,\s*")


def _gemma_call(format: ToolFormat, cursor: Cursor, tools: Sequence[Any]) -> ParsedCall:
    """Parse a call such as `call:get{city:<escape>Bonn<escape>,days:[1,2]}`."""
    name = cursor.need(r"[\s,]*call:(?P<name>[\w.-]+)\s*(?=\{)")["name"]
    return {"name": name, "arguments": _gemma_value(cursor, re.escape(format.inner[0]))}


def _gemma_value(cursor: Cursor, quote: str) -> Any:
    value = functools.partial(_gemma_value, quote=quote)
    if cursor.take(quote) is not None:
        return cursor.until(rf"{quote}(?=\s*[,}}\]])")
    if cursor.take(r"\{\s*") is not None:
        key = rf"(?:{quote})?([^:{{}}]+?)(?:{quote})?\s*:\s*"
        return dict(_entries(cursor, r"\s*\}", key, value))
    if cursor.take(r"\[\s*") is not None:
        return [item for _, item in _entries(cursor, r"\s*\]", "()", value)]
    return unquoted(cursor.need(rf"{JSON_STRING.pattern}|[^,{{}}\[\]]+")[0].strip())


def _python_call(format: ToolFormat, cursor: Cursor, tools: Sequence[Any]) -> ParsedCall:
    """Parse a call in Python, such as `get(city="Bonn", days=[1, 2])`, within a list."""
    name = cursor.need(r"\s*[\[,]\s*(?P<name>[\w.-]+)\(\s*")["name"]
    arguments = _entries(cursor, r"\s*\)", r"([^\s=,()]+)\s*=\s*", _python_value)
    return {"name": name, "arguments": dict(arguments)}


def _python_value(cursor: Cursor) -> Any:
    if text := cursor.take(rf"(?:{QUOTED})(?=\s*[,)])"):
        return string_of(text[0])
    if opened := cursor.take("[\"']"):
        # Older templates write the text as it is.
        return cursor.until(rf"{opened[0]}(?=\s*(?:,\s*[^\s=,()]+\s*=|\)\s*[,\]]))")
    begin, depth = cursor.at, 0
    if cursor.text[begin : begin + 1] not in ("[", "{"):
        return unquoted(cursor.need(r"[^,()\[\]{}]+")[0].strip())
    while cursor.at == begin or depth:
        token = cursor.need(rf"(?:{QUOTED}|[^\[\]{{}}\"'])*+([\[\]{{}}\"']?)")[1]
        if token in ("'", '"'):
            raise OpenEndError
        depth += 1 if token in ("[", "{") else -1
    if isinstance(value := unquoted(cursor.text[begin : cursor.at]), str):
        raise ValueError(f"neither JSON nor Python: {value:.80}")
    return value


PARSERS = {"tags": _tagged_call, "gemma": _gemma_call, "python": _python_call}
"""Parsers of a call by the kind of its arguments. Each raises ValueError or RecursionError if the
text is no call, and OpenEndError if it ends within a value."""
