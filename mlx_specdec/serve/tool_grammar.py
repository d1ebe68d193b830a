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
from ..text.markers import CallFormat, Marker, Markers, typed
from .chat import Tool, Tools
from .problems import unsupported

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


NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,2}/"
"""Behind a thought."""
LINE = r"/\n?/"


@dataclass(frozen=True)
class Shape:
    """A section of calls: what comes first and last, between two calls, and in each call before its
    arguments, by the tool's name, and behind them. arguments: the rules of a tool's arguments, the
    first of which has the given name."""

    before: Callable[[str], str]
    behind: str
    arguments: Callable[[str, Tool], list[str]]
    between: str = ""
    first: str = ""
    last: str = ""


def grammar_of(tools: Tools, markers: Markers, *, thinking: bool) -> str:
    """What a text has to be in which one of `tools.must` is called.

    thinking: the text begins within a thought. Raises Problem where the model writes arguments in a
    way that no JSON schema describes.
    """
    calls = markers.calls
    assert calls is not None, "nobody asks of a model that calls no tools"
    shape = SHAPES[calls.name](calls, markers) if calls.name in SHAPES else None
    if shape is None:
        raise unsupported(
            "tool_choice",
            f"calls as this model writes them ({calls.name}) can be read, and not be asked for: "
            "tool_choice must be auto or none",
        )
    given = {each["function"]["name"]: each for each in tools.given}
    more = "" if tools.most_calls == 1 else f"({shape.between} call)*"
    rules = [f"start: {_thoughts(markers, thinking)} {shape.first} call {more} {shape.last}"]
    rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools.must))))
    for at, name in enumerate(tools.must):
        rules.append(f"call_{at}: {shape.before(name)} arguments_{at} {shape.behind}")
        rules += shape.arguments(f"arguments_{at}", given[name])
    return "\n".join([*rules, *_rules_of_thoughts(markers)])


def _json(rule: str, tool: Tool) -> list[str]:
    schema = tool["function"].get("parameters") or NO_PARAMETERS
    return [f"{rule}: %json {json.dumps({**schema, 'x-guidance': JSON_STYLE})}"]


def _json_tools(calls: CallFormat, markers: Markers) -> Shape:
    begin, end = _rule(calls.begin, markers), _rule(calls.end, markers)
    return Shape(
        before=lambda name: f"{begin} {_literal(_head(name, line=True))}",
        behind=f"{_literal('}' + chr(10))} {end}",
        arguments=_json,
        between=_literal("\n"),
    )


def _kimi_k2(calls: CallFormat, markers: Markers) -> Shape | None:
    inner = [f"<[{id}]>" for id in calls.inner.values()]
    if len(inner) < 3:
        return None
    begin, argument, end = inner
    return Shape(
        before=lambda name: f"{begin} {_literal(f'functions.{name}:')} /[0-9]{{1,3}}/ {argument}",
        behind=end,
        arguments=_json,
        first=_rule(calls.begin, markers),
        last=_rule(calls.end, markers),
    )


def _mistral(calls: CallFormat, markers: Markers) -> Shape:
    begin = _rule(calls.begin, markers)
    if calls.inner:
        [arguments] = calls.inner.values()
        return Shape(lambda name: f"{begin} {_literal(name)} <[{arguments}]>", "", _json)
    return Shape(
        before=lambda name: _literal(_head(name)),
        behind=_literal("}"),
        arguments=_json,
        between=_literal(", "),
        first=f"{begin} / ?/ {_literal('[')}",
        last=_literal("]"),
    )


def _qwen3_coder(calls: CallFormat, markers: Markers) -> Shape:
    begin, end = _rule(calls.begin, markers), _rule(calls.end, markers)
    tags = Tags(lambda key: _literal(f"<parameter={key}>\n"), "\n</parameter>", "\n", trimmed=False)
    return Shape(
        before=lambda name: f"{begin} {_literal(f'{chr(10)}<function={name}>{chr(10)}')}",
        behind=f"{_literal(f'</function>{chr(10)}')} {end}",
        arguments=tags.arguments,
        between=_literal("\n"),
    )


def _glm47(calls: CallFormat, markers: Markers) -> Shape:
    begin, end = _rule(calls.begin, markers), _rule(calls.end, markers)

    def before(key: str) -> str:
        # GLM 4.5 begins a line here, and GLM 4.7 does not.
        return f"{LINE} {_literal(f'<arg_key>{key}</arg_key>')} {LINE} {_literal('<arg_value>')}"

    return Shape(
        before=lambda name: f"{begin} {_literal(name)}",
        behind=f"{LINE} {end}",
        arguments=Tags(before, "</arg_value>").arguments,
        between=LINE,
    )


def _minimax_m2(calls: CallFormat, markers: Markers) -> Shape:
    tags = Tags(lambda key: _literal(f'<parameter name="{key}">'), "</parameter>", "\n")
    return Shape(
        before=lambda name: _literal(f'<invoke name="{name}">\n'),
        behind=_literal("</invoke>\n"),
        arguments=tags.arguments,
        first=f"{_rule(calls.begin, markers)} {_literal(chr(10))}",
        last=_rule(calls.end, markers),
    )


SHAPES: Mapping[str, Callable[[CallFormat, Markers], Shape | None]] = {
    "glm47": _glm47,
    "json_tools": _json_tools,
    "kimi_k2": _kimi_k2,
    "laguna": _glm47,
    "minimax_m2": _minimax_m2,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
"""By the name of mlx-lm's parser."""


def _head(name: str, *, line: bool = False) -> str:
    return f'{chr(10) if line else ""}{{"name": "{name}", "arguments": '


def _thoughts(markers: Markers, thinking: bool) -> str:
    """What comes before the calls: the rest of a thought, or a whole one if the model likes."""
    if markers.think_end is None:
        return ""
    return f"thinking {LINES}" if thinking else f"(thought {LINES})?"


def _rules_of_thoughts(markers: Markers) -> Iterator[str]:
    begin, end = markers.think_begin, markers.think_end
    if begin is None or end is None:
        return
    yield f"thought: {_rule(begin, markers)} thinking"
    if markers.special.keys().isdisjoint(end.ids):
        yield f"thinking[suffix={_literal(end.text)}]: {ANY_TEXT}"
    else:
        yield f"thinking: {ANY_TEXT} {_rule(end, markers)}"


def _rule(marker: Marker, markers: Markers) -> str:
    """A marker: special tokens by their ids, what is text as text."""
    parts, text = [], marker.text
    for id in marker.ids:
        if id in markers.special:
            before, piece, text = text.partition(markers.special[id])
            parts += [_literal(before)] if before else []
            parts.append(f"<[{id}]>" if piece else "")
    return " ".join([*parts, _literal(text)] if text else parts)


def _literal(text: str) -> str:
    return json.dumps(text)
