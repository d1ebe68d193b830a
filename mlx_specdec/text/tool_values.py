"""Values of arguments in tool calls, read from JSON, from Python's literals and from texts without
quotes, and the types that a tool's schema admits."""

import ast
import codecs
import contextlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]
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
PYTHON_VALUES = ("True", "False", "None")
ESCAPE = re.compile(
    r"\\(?:[\\'\"abfnrtv]|[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^}]*\})"
)
"""Matches an escape sequence of Python. Any other backslash means itself."""


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


def kinds_of(schema: object, root: Schema, resolved: dict[str, frozenset[str]]) -> frozenset[str]:
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
            resolved[reference] = ANY
            resolved[reference] = kinds_of(schema_at(root, reference), root, resolved)
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


def schema_at(root: Schema, reference: str) -> Schema | None:
    """Return the schema at a reference such as `#/$defs/name`, or None."""
    here: Any = root
    for part in reference.removeprefix("#/").split("/"):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else None


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
    if words and (text in PYTHON_VALUES or text.startswith(("[", "{"))):
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
