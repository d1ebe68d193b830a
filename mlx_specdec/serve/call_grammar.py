"""Grammars of texts in which a tool is called.

In llguidance's Lark. The arguments are bound to the schema of their tool, within the marks that the
model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..sampling.grammar import JSON_STYLE
from ..text.markers import CallFormat, Marker, Markers
from .problems import unsupported
from .tools import Tool, Tools
from .xml_calls import Tags

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
ANYTHING = r"/(.|\n)*/"
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
        yield f"thinking[suffix={_literal(end.text)}]: {ANYTHING}"
    else:
        yield f"thinking: {ANYTHING} {_rule(end, markers)}"


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
