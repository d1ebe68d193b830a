"""Grammars of arguments that stand between tags of their own, as Qwen3-Coder, GLM and MiniMax write
them: strings as they are, everything else as JSON. In llguidance's Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..sampling.grammar import JSON_STYLE
from ..text.tool_types import typed
from .problems import unsupported
from .tools import Tool

Schema = Mapping[str, Any]
KEY = re.compile(r"[A-Za-z0-9_.-]+")
SAID = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "strict"}
"""Keys of a schema that bind nothing."""
OF_ALL = SAID | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = SAID | {"type", "enum", "const", "minLength", "maxLength", "pattern", "nullable"}
ANYTHING = r"(.|\n)*"
NULL = "~/[nN][uU][lL][lL]/"
"""What parsers read as null, whatever the type."""
TRIMMED = rf"~/\s{ANYTHING}/ & ~/{ANYTHING}\s/"


@dataclass(frozen=True)
class Tags:
    """before: of an argument by its name, in Lark. end: of its value. behind: it, up to the next.
    trimmed: white space around a string is not read."""

    before: Callable[[str], str]
    end: str
    behind: str = ""
    trimmed: bool = True

    def arguments(self, rule: str, tool: Tool) -> list[str]:
        """The rules of a tool's arguments, of which `rule` is the first: the properties in the
        schema's order, and no others. Raises Problem for what no such text can be bound to."""
        function = tool["function"]
        parameters = function.get("parameters") or {}
        where = f"the parameters of {function['name']}"
        _check(parameters, OF_ALL, where)
        properties = parameters.get("properties", {})
        required = parameters.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise unsupported("tools", f"{where} need an object as properties, a list as required")
        if missing := [each for each in required if each not in properties]:
            raise unsupported("tools", f"{where} require {missing[0]}, which has no schema")
        own = [f"{rule}_{at}{'' if key in required else '?'}" for at, key in enumerate(properties)]
        rules = [f"{rule}: {' '.join(own) or json.dumps('')}"]
        for at, (key, schema) in enumerate(properties.items()):
            if not KEY.fullmatch(key):
                raise unsupported("tools", f"{where} have a name that no tag has: {key:.80}")
            rules += self._argument(f"{rule}_{at}", key, schema, parameters, f"{key} of {where}")
        return rules

    def _argument(
        self, rule: str, key: str, schema: object, root: Schema, where: str
    ) -> Iterator[str]:
        told = typed(schema, root)
        kind = told.get("type")
        if not isinstance(kind, str):
            raise unsupported("tools", f"{where} must have one type: these calls do not tell types")
        behind = json.dumps(self.behind)
        yield f"{rule}: {self.before(key)} {rule}_value {behind}"
        if kind != "string":
            whole = {"$defs": root.get("$defs", {}), "definitions": root.get("definitions", {})}
            own = schema if isinstance(schema, Mapping) else {}
            bound = json.dumps({**whole, **own, "x-guidance": JSON_STYLE})
            yield f"{rule}_value: {rule}_json {json.dumps(self.end)}"
            yield f"{rule}_json: %json {bound}"
            return
        _check(told, OF_STRINGS, where)
        if (choices := _choices(told)) is not None:
            yield f"{rule}_value: ({' | '.join(map(json.dumps, choices))}) {json.dumps(self.end)}"
            return
        least, most = told.get("minLength", 0), told.get("maxLength", "")
        with_end = f"/{ANYTHING}/ {json.dumps(self.end)} /{ANYTHING}/"
        terms = [rf"/(.|\n){{{least},{most}}}/", f"~({with_end})"]
        terms += [NULL, *([TRIMMED] if self.trimmed else []), *_patterns(told)]
        yield f"{rule.upper()}: {' & '.join(terms)}"
        yield f"{rule}_value[suffix={json.dumps(self.end)}]: {rule.upper()}"


def _check(schema: Schema, known: set[str], where: str) -> None:
    for key in schema:
        if key not in known:
            told = f"{where} cannot be bound to {key:.80} in calls of this model"
            raise unsupported("tools", f"{told}: leave it out, or let tool_choice be auto")


def _choices(schema: Schema) -> list[str] | None:
    """The strings that a schema enumerates; None where it does not."""
    if "const" in schema:
        return [str(schema["const"])]
    given = schema.get("enum")
    return [each for each in given if isinstance(each, str)] if isinstance(given, list) else None


def _patterns(schema: Schema) -> Iterator[str]:
    """What a string has to match somewhere, as something that it has to match as a whole."""
    if "pattern" not in schema:
        return
    pattern = str(schema["pattern"])
    begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = re.sub(r"(?<!\\)/", r"\/", pattern[begun : len(pattern) - ended])
    yield f"/{'' if begun else ANYTHING}({inner}){'' if ended else ANYTHING}/"
