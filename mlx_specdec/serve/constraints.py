"""Constraints of the generated text: the JSON schemas, expressions, grammars and choices that
requests give, and the grammars of tool calls that they demand."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..engine.pair import Pair
from ..engine.request import for_model
from ..errors import OptionError
from ..options import Options
from ..sampling.grammar import JSON_STYLE
from ..text.markers import CallFormat, Marker, Markers, typed
from .body import Body
from .chat import Tool, Tools
from .problems import invalid, unsupported
from .settings import Limits

Constraint = dict[str, Any]
"""The one option that constrains a text, by its name; empty where none does."""


def constraint_of(body: Body, pair: Pair, options: Options, limits: Limits) -> Constraint:
    """Return the constraint of a body, after a check that this model can satisfy it.

    options: of the server. Raises Problem, which names the field.
    """
    for name, read in FIELDS.items():
        if name in body and (constraint := read(body[name])):
            return _checked(pair, options, name, constraint, limits)
    return {}


def calls_constraint(
    tools: Tools, markers: Markers, pair: Pair, options: Options, limits: Limits, *, thinking: bool
) -> Constraint:
    """Return the constraint of a text that has to call a tool. thinking: it begins within the
    reasoning. Raises Problem."""
    _check_size("tools", {"json_schema": json.dumps(tools.given)}, limits)
    grammar = {"grammar": grammar_of(tools, markers, thinking=thinking)}
    return _checked(pair, options, "tools", grammar, limits)


def _checked(
    pair: Pair, options: Options, field: str, constraint: Constraint, limits: Limits
) -> Constraint:
    """Return a constraint that llguidance can read and the model can satisfy. field: of the body,
    for the error. Raises Problem."""
    _check_size(field, constraint, limits)
    try:
        for_model(pair, replace(options, **constraint))
    except OptionError as error:
        raise invalid(str(error), field) from None
    return constraint


def _check_size(field: str, constraint: Constraint, limits: Limits) -> None:
    """Refuse a constraint that would take long to compile. Raises Problem."""
    [(kind, text)] = constraint.items()
    if len(text.encode()) > limits.schema_bytes:
        raise invalid(f"{field} has more than {limits.schema_bytes} bytes: shorten it", field)
    if kind == "json_schema" and _depth(text) > limits.schema_depth:
        raise invalid(f"{field} is nested more than {limits.schema_depth} deep", field)


def _depth(text: str) -> int:
    """Return how many brackets of a JSON text are inside each other."""
    outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    steps = ((each in "[{") - (each in "]}") for each in outside_strings)
    return max(accumulate(steps), default=0)


def _response_format(given: Body) -> Constraint:
    """OpenAI's. llama.cpp has the schema one level further out, where TGI calls it value."""
    if given["type"] == "text":
        return {}
    if given["type"] == "json_object":
        return _json_schema(given.get("schema") or given.get("value") or {"type": "object"})
    return _json_schema(given.get("json_schema", given)["schema"])


def _structured_outputs(given: Body) -> Constraint:
    """vLLM's."""
    [(kind, value)] = given.items()
    return KINDS[kind](value)


def _json_schema(schema: str | Body) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return {"json_schema": text}


def _choice(texts: Sequence[str]) -> Constraint:
    literals = (json.dumps(each, ensure_ascii=False) for each in texts)
    return {"grammar": f"start: {' | '.join(literals)}"}


KINDS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": _json_schema,
    "regex": lambda pattern: {"regex": pattern},
    "grammar": lambda grammar: {"grammar": grammar},
    "choice": _choice,
}
FIELDS: Mapping[str, Callable[[Any], Constraint]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "regex": KINDS["regex"],
    "grammar": KINDS["grammar"],
    **{f"guided_{kind}": read for kind, read in KINDS.items()},
}


KEY = re.compile(r"[A-Za-z0-9_.-]+")
NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "strict"}
"""Keywords of a schema that constrain nothing."""
OF_ALL = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
OF_STRINGS = NOTES | {"type", "enum", "const", "minLength", "maxLength", "pattern", "nullable"}
ANYTHING = r"(.|\n)*"
NULL = "~/[nN][uU][lL][lL]/"
"""Parsers read it as null, whatever the type."""
TRIMMED = rf"~/\s{ANYTHING}/ & ~/{ANYTHING}\s/"


@dataclass(frozen=True)
class Tags:
    """Arguments that stand between tags, as Qwen3-Coder, GLM and MiniMax write them:
    strings as they are, everything else as JSON.

    before: what precedes an argument, by its name, in Lark. end: of its value. behind: what stands
    between the end and the next argument. trimmed: parsers strip white space around a string.
    """

    before: Callable[[str], str]
    end: str
    behind: str = ""
    trimmed: bool = True

    def arguments(self, rule: str, tool: Tool) -> list[str]:
        """Return the rules of a tool's arguments, of which `rule` is the first: the properties in
        the schema's order, and no others. Raises Problem for schemas that no tags can hold."""
        function = tool["function"]
        parameters = function.get("parameters") or {}
        where = f"the parameters of {function['name']}"
        _check(parameters, OF_ALL, where)
        properties = parameters.get("properties", {})
        required = parameters.get("required", [])
        if missing := [each for each in required if each not in properties]:
            raise unsupported("tools", f"{where} require {missing[0]}, which has no schema")
        each = [f"{rule}_{at}{'' if key in required else '?'}" for at, key in enumerate(properties)]
        rules = [f"{rule}: {' '.join(each) or json.dumps('')}"]
        for at, (key, schema) in enumerate(properties.items()):
            if not KEY.fullmatch(key):
                raise unsupported("tools", f"{where} have a name that no tag has: {key:.80}")
            rules += self._argument(f"{rule}_{at}", key, schema, parameters, f"{key} of {where}")
        return rules

    def _argument(
        self, rule: str, key: str, schema: object, root: Mapping[str, Any], where: str
    ) -> Iterator[str]:
        resolved = typed(schema, root)
        kind = resolved.get("type")
        if not isinstance(kind, str):
            raise unsupported("tools", f"{where} must have one type: these calls do not tell types")
        behind = json.dumps(self.behind)
        yield f"{rule}: {self.before(key)} {rule}_value {behind}"
        if kind != "string":
            whole = {"$defs": root.get("$defs", {}), "definitions": root.get("definitions", {})}
            given = schema if isinstance(schema, Mapping) else {}
            bound = json.dumps({**whole, **given, "x-guidance": JSON_STYLE})
            yield f"{rule}_value: {rule}_json {json.dumps(self.end)}"
            yield f"{rule}_json: %json {bound}"
            return
        _check(resolved, OF_STRINGS, where)
        choices = [resolved["const"]] if "const" in resolved else resolved.get("enum")
        if isinstance(choices, list):
            texts = " | ".join(json.dumps(each) for each in choices if isinstance(each, str))
            yield f"{rule}_value: ({texts}) {json.dumps(self.end)}"
            return
        least, most = resolved.get("minLength", 0), resolved.get("maxLength", "")
        with_end = f"/{ANYTHING}/ {json.dumps(self.end)} /{ANYTHING}/"
        terms = [rf"/(.|\n){{{least},{most}}}/", f"~({with_end})"]
        terms += [NULL, *([TRIMMED] if self.trimmed else []), *_patterns(resolved)]
        yield f"{rule.upper()}: {' & '.join(terms)}"
        yield f"{rule}_value[suffix={json.dumps(self.end)}]: {rule.upper()}"


def _check(schema: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in schema:
        if key not in known:
            message = f"{where} cannot be bound to {key:.80} in calls of this model"
            raise unsupported("tools", f"{message}: leave it out, or let tool_choice be auto")


def _patterns(schema: Mapping[str, Any]) -> Iterator[str]:
    """Turn the pattern of a schema, which may match anywhere, into one of the whole string."""
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
"""After the reasoning."""
LINE = r"/\n?/"


@dataclass(frozen=True)
class Shape:
    """How a model writes a section of calls, in Lark.

    before: what precedes the arguments of a call, by the tool's name. behind: what follows them.
    arguments: the rules of a tool's arguments, the first of which has the given name. between: two
    calls. first, last: the begin and end of the section.
    """

    before: Callable[[str], str]
    behind: str
    arguments: Callable[[str, Tool], list[str]]
    between: str = ""
    first: str = ""
    last: str = ""


def grammar_of(tools: Tools, markers: Markers, *, thinking: bool) -> str:
    """Return the grammar of a text that calls one of `tools.must`.

    thinking: the text begins within the reasoning. Raises Problem where the model writes arguments
    in a way that no JSON schema describes.
    """
    calls = markers.calls
    assert calls is not None, "markers_of found no format of calls"
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
        before=lambda name: f"{begin} {json.dumps(_head(name, line=True))}",
        behind=f"{json.dumps('}' + chr(10))} {end}",
        arguments=_json,
        between=json.dumps("\n"),
    )


def _kimi_k2(calls: CallFormat, markers: Markers) -> Shape | None:
    inner = [f"<[{id}]>" for id in calls.inner.values()]
    if len(inner) < 3:
        return None
    begin, argument, end = inner
    return Shape(
        before=lambda name: f"{begin} {json.dumps(f'functions.{name}:')} /[0-9]{{1,3}}/ {argument}",
        behind=end,
        arguments=_json,
        first=_rule(calls.begin, markers),
        last=_rule(calls.end, markers),
    )


def _mistral(calls: CallFormat, markers: Markers) -> Shape:
    begin = _rule(calls.begin, markers)
    if calls.inner:
        [arguments] = calls.inner.values()
        return Shape(lambda name: f"{begin} {json.dumps(name)} <[{arguments}]>", "", _json)
    return Shape(
        before=lambda name: json.dumps(_head(name)),
        behind=json.dumps("}"),
        arguments=_json,
        between=json.dumps(", "),
        first=f"{begin} / ?/ {json.dumps('[')}",
        last=json.dumps("]"),
    )


def _qwen3_coder(calls: CallFormat, markers: Markers) -> Shape:
    begin, end = _rule(calls.begin, markers), _rule(calls.end, markers)
    tags = Tags(
        lambda key: json.dumps(f"<parameter={key}>\n"), "\n</parameter>", "\n", trimmed=False
    )
    return Shape(
        before=lambda name: f"{begin} {json.dumps(f'{chr(10)}<function={name}>{chr(10)}')}",
        behind=f"{json.dumps(f'</function>{chr(10)}')} {end}",
        arguments=tags.arguments,
        between=json.dumps("\n"),
    )


def _glm47(calls: CallFormat, markers: Markers) -> Shape:
    begin, end = _rule(calls.begin, markers), _rule(calls.end, markers)

    def before(key: str) -> str:
        # GLM 4.5 begins a line here, and GLM 4.7 does not.
        return (
            f"{LINE} {json.dumps(f'<arg_key>{key}</arg_key>')} {LINE} {json.dumps('<arg_value>')}"
        )

    return Shape(
        before=lambda name: f"{begin} {json.dumps(name)}",
        behind=f"{LINE} {end}",
        arguments=Tags(before, "</arg_value>").arguments,
        between=LINE,
    )


def _minimax_m2(calls: CallFormat, markers: Markers) -> Shape:
    tags = Tags(lambda key: json.dumps(f'<parameter name="{key}">'), "</parameter>", "\n")
    return Shape(
        before=lambda name: json.dumps(f'<invoke name="{name}">\n'),
        behind=json.dumps("</invoke>\n"),
        arguments=tags.arguments,
        first=f"{_rule(calls.begin, markers)} {json.dumps(chr(10))}",
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
    """Return what precedes the calls: the rest of the reasoning, or optionally all of it."""
    if markers.think_end is None:
        return ""
    return f"thinking {LINES}" if thinking else f"(thought {LINES})?"


def _rules_of_thoughts(markers: Markers) -> Iterator[str]:
    begin, end = markers.think_begin, markers.think_end
    if begin is None or end is None:
        return
    yield f"thought: {_rule(begin, markers)} thinking"
    if markers.special.keys().isdisjoint(end.ids):
        yield f"thinking[suffix={json.dumps(end.text)}]: {ANY_TEXT}"
    else:
        yield f"thinking: {ANY_TEXT} {_rule(end, markers)}"


def _rule(marker: Marker, markers: Markers) -> str:
    """Return the rule of a marker: special tokens by their ids, the rest as text."""
    parts, text = [], marker.text
    for id in marker.ids:
        if id in markers.special:
            before, piece, text = text.partition(markers.special[id])
            parts += [json.dumps(before)] if before else []
            parts.append(f"<[{id}]>" if piece else "")
    return " ".join([*parts, json.dumps(text)] if text else parts)
