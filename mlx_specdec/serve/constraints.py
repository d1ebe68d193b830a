"""Constraints on completions: JSON schemas, regular expressions, grammars and choices of requests,
and grammars of demanded tool calls."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from keyword import iskeyword
from typing import Any, Literal

from ..engine.pair import Pair
from ..engine.request import for_model
from ..errors import OptionError
from ..options import Options
from ..sampling.grammar import JSON_STYLE, compiled, enforceable, rule_of
from ..text.markers import NONE, Markers, typed
from ..text.messages import Tool, log_once
from ..text.tool_formats import BEGIN, CHANNEL, END, ArgumentTags, Parts
from .bodies import Body
from .chat import Tools
from .problems import Problem, invalid, unsupported
from .settings import Limits

Constraint = dict[str, Any]
"""The option with the constraint, by the option's name, or {} for no constraint."""
Thought = Literal["begun", "none", "optional", "open", "close"]
"""The text before an answer. begun: Nothing, since the prompt already begins the answer. none: No
thought. optional: A thought, if the model opens one. open: The rest of a thought that the prompt
has opened. close: Only the end of such a thought, since the request turns reasoning off."""


def constraint_of(body: Body, pair: Pair, options: Options, limits: Limits) -> Constraint:
    """Return the constraint of a body. options: The server's defaults. Raises Problem."""
    for name, read in FIELDS.items():
        if name in body and (constraint := read(body[name])):
            return _checked(pair, options, name, constraint, limits)
    return {}


def after_thought(options: Options, markers: Markers, thought: Thought) -> Options:
    """Return options whose constraint begins after the thought. A grammar that contains the markers
    is not changed. Raises Problem."""
    written = f"{options.regex or ''}{options.grammar or ''}"
    marks = [
        marker.text for marker in (markers.think_begin, markers.think_end) if marker is not None
    ]
    if markers.channels is not None:
        marks.append(CHANNEL)
    (thoughts, rules), header = _thoughts(markers, thought), _answer_header(markers, thought)
    before, grammar = f"{thoughts} {header}".strip(), options.constraint
    if grammar is None or not before or any(mark in written for mark in marks):
        return options
    text = "\n".join([f"start: {before} answer", rule_of("answer", grammar), *rules])
    try:
        return replace(options, json_schema=None, regex=None, grammar=text)
    except OptionError as error:
        raise invalid(f"after the thought, {error}", "response_format") from None


def calls_constraint(
    tools: Tools,
    markers: Markers,
    pair: Pair,
    options: Options,
    limits: Limits,
    *,
    thought: Thought,
) -> Constraint:
    """Return the constraint for completions that must call a tool or match `tools.schema`. Raises
    Problem."""
    if tools.must:
        _check_size("tools", {"json_schema": json.dumps(tools.listed)}, limits)
    write, field = (grammar_of, "tools") if tools.must else (_call_or_schema, "response_format")
    grammar = {"grammar": write(tools, markers, thought=thought)}
    try:
        return _checked(pair, options, field, grammar, limits)
    except Problem:
        for tool in tools.listed if tools.must else ():
            _check_parameters(tool["function"])
        raise


def _check_parameters(function: Body) -> None:
    """Raise Problem, which names the tool, if its schema alone cannot be enforced."""
    try:
        compiled(json.dumps(function.get("parameters") or NO_PARAMETERS), None, None)
    except OptionError as error:
        raise invalid(f"the parameters of {function['name']}: {error}", "tools") from None


def _checked(
    pair: Pair, options: Options, field: str, constraint: Constraint, limits: Limits
) -> Constraint:
    """Check that the model can satisfy a constraint, and return it. Raises Problem, which names the
    field."""
    _check_size(field, constraint, limits)
    try:
        for_model(pair, replace(options, **constraint))
    except OptionError as error:
        raise invalid(str(error), field) from None
    return constraint


def _check_size(field: str, constraint: Constraint, limits: Limits) -> None:
    """Raise Problem for a constraint that would take long to compile."""
    [(kind, text)] = constraint.items()
    if len(text.encode()) > limits.schema_bytes:
        raise invalid(f"{field} has more than {limits.schema_bytes} bytes: shorten it", field)
    outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", text) if kind == "json_schema" else ""
    depths = accumulate((character in "[{") - (character in "]}") for character in outside_strings)
    if max(depths, default=0) > limits.schema_depth:
        raise invalid(f"{field} is nested more than {limits.schema_depth} deep", field)


def _response_format(response_format: Body) -> Constraint:
    """Return the constraint of OpenAI's response_format. In llama.cpp's form, `schema` is one level
    higher; in TGI's form, it is called `value`."""
    if response_format["type"] == "text":
        return {}
    if response_format["type"] == "json_object":
        return _json_schema(
            response_format.get("schema") or response_format.get("value") or {"type": "object"}
        )
    return _json_schema(response_format.get("json_schema", response_format)["schema"])


def _json_schema(schema: str | Body) -> Constraint:
    text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return {"json_schema": text}


KINDS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": _json_schema,
    "regex": lambda pattern: {"regex": pattern},
    "grammar": lambda grammar: {"grammar": grammar},
    "choice": lambda texts: {"grammar": f"start: {' | '.join(map(json.dumps, texts))}"},
}
FIELDS: Mapping[str, Callable[[Any], Constraint]] = {
    "response_format": _response_format,
    # vLLM's object with one field.
    "structured_outputs": lambda outputs: next(KINDS[kind](outputs[kind]) for kind in outputs),
    "regex": KINDS["regex"],
    "grammar": KINDS["grammar"],
    **{f"guided_{kind}": read for kind, read in KINDS.items()},
}
NOTES = {"title", "description", "default", "examples", "deprecated", "$schema", "$id", "strict"}
"""Keywords of a schema that are no constraints."""
OF_ALL = NOTES | {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
ELSEWHERE = ("$ref", "allOf")
"""Keywords of parameters that may contain properties. Without these properties, no call would match
the schema."""
OF_STRINGS = NOTES | {"type", "enum", "const", "minLength", "maxLength", "pattern", "nullable"}
OF_LISTS = NOTES | {"type", "items"}
ANYTHING = r"(.|\n)*"


def _lark(parts: Parts, name: str = "", markers: Markers = NONE) -> str:
    """Return a sequence in Lark's syntax. markers: The model's markers, for BEGIN and END."""
    calls = markers.calls
    marks = {} if calls is None else {BEGIN: calls.begin.text, END: calls.end.text}
    return " ".join(
        part
        if part.startswith("/")
        else _literal(marks.get(part, part.replace("NAME", name)), markers)
        for part in parts
    )


def tagged_arguments(
    tags: ArgumentTags, rule: str, tool: Tool, markers: Markers = NONE
) -> list[str]:
    """Return the rules for arguments between tags. They allow only the schema's properties, in the
    schema's order.

    Args:
        rule: The name of the first rule.
        markers: The model's markers, for quotes that are special tokens.
    Raises:
        Problem: If arguments between tags cannot be constrained to the schema.
    """
    function = tool["function"]
    parameters = enforceable(function.get("parameters") or {}) or {}
    where = f"the parameters of {function['name']}"
    return list(_Tagged(tags, markers, parameters).properties(rule, parameters, where))


@dataclass(frozen=True)
class _Tagged:
    """The rules of values in one format. root: The schema to which references are relative."""

    tags: ArgumentTags
    markers: Markers
    root: Mapping[str, Any]

    def properties(self, rule: str, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        """Yield the rules of an object's properties. where: Names the object in errors."""
        properties = schema.get("properties", {})
        properties = {key: value for key, value in properties.items() if value is not False}
        elsewhere = ELSEWHERE if properties else (*ELSEWHERE, "anyOf", "oneOf")
        if hidden := [key for key in elsewhere if key in schema]:
            message = f"{where} cannot be bound to {hidden[0]} in calls of this model"
            raise unsupported("tools", f"{message}: leave it out, or let tool_choice be auto")
        _log_ignored(schema, OF_ALL, where)
        required = schema.get("required", [])
        if missing := [key for key in required if key not in properties]:
            raise unsupported("tools", f"{where} require {missing[0]}, which has no schema")
        yield from self._order(rule, [key in required for key in properties])
        for at, (key, value) in enumerate(properties.items()):
            if not self.tags.names.fullmatch(key) or (self.tags.quote == '"' and iskeyword(key)):
                raise unsupported("tools", f"{where} have a name that no tag has: {key:.80}")
            yield from self._argument(f"{rule}_{at}", key, value, f"{key} of {where}")

    def _order(self, rule: str, required: Sequence[bool]) -> Iterator[str]:
        """Yield the rules of the order of properties."""
        if not self.tags.between or not required:
            names = [f"{rule}_{at}{'' if must else '?'}" for at, must in enumerate(required)]
            yield f"{rule}: {' '.join(names) or json.dumps('')}"
            return
        yield f"{rule}: {rule}_begin_0"
        for at, must in enumerate(required):
            for part, before in (("begin", ""), ("rest", json.dumps(self.tags.between))):
                skipped = "" if must else f" | {rule}_{part}_{at + 1}"
                yield f"{rule}_{part}_{at}: {before} {rule}_{at} {rule}_rest_{at + 1}{skipped}"
        for part in ("begin", "rest"):
            yield f'{rule}_{part}_{len(required)}: ""'

    def _argument(self, rule: str, key: str, schema: object, where: str) -> Iterator[str]:
        tags = self.tags
        yield f"{rule}: {_lark(tags.before, key)} {rule}_value {json.dumps(tags.after)}"
        if tags.quote == '"':
            yield f"{rule}_value: {rule}_json {json.dumps(tags.end)}"
            yield self._json(f"{rule}_json", schema)
            return
        resolved = typed(schema, self.root)
        kind = resolved.get("type")
        if not isinstance(kind, str):
            raise unsupported("tools", f"{where} must have one type: these calls do not tell types")
        if kind == "string":
            yield from self._string(f"{rule}_value", resolved, where)
        elif kind in ("array", "object") and tags.quote:
            yield from self._nested(f"{rule}_value", resolved, where)
        else:
            yield f"{rule}_value: {rule}_json {json.dumps(tags.end)}"
            yield self._json(f"{rule}_json", schema)

    def _json(self, rule: str, schema: object) -> str:
        definitions = {
            key: self.root.get(key, {}) for key in ("$defs", "definitions") if key in self.root
        }
        return _bound(rule, {**definitions, **(schema if isinstance(schema, Mapping) else {})})

    def _string(self, rule: str, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        """Yield the rules of a string with its end. schema: With a `type`."""
        tags = self.tags
        _log_ignored(schema, OF_STRINGS, where)
        opened = _literal(tags.quote, self.markers)
        end = tags.quote + tags.end
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list):
            texts = " | ".join(json.dumps(choice) for choice in choices if isinstance(choice, str))
            yield f"{rule}: {opened} ({texts}) {_literal(end, self.markers)}"
            return
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        patterns = [schema["pattern"]] if "pattern" in schema else []
        terms = [rf"/(.|\n){{{least},{most}}}/"]
        terms.append(f"~(/{ANYTHING}/ {json.dumps(end)} /{ANYTHING}/)")
        terms += map(_pattern, patterns)
        yield f"{rule.upper()}: {' & '.join(terms)}"
        if end in self.markers.special.values():
            yield f"{rule}: {opened} {rule.upper()} {_literal(end, self.markers)}"
        else:
            yield f"{rule}: {opened} {rule}_text"
            yield f"{rule}_text[suffix={json.dumps(end)}]: {rule.upper()}"

    def _nested(self, rule: str, schema: Mapping[str, Any], where: str) -> Iterator[str]:
        """Yield the rules of a list or an object. schema: With a `type`."""
        if schema["type"] == "object":
            yield f'{rule}: "{{" {rule}_of "}}"'
            yield from self.properties(f"{rule}_of", schema, where)
            return
        _log_ignored(schema, OF_LISTS, where)
        tags = replace(self.tags, before=(), end="", after="")
        yield f'{rule}: "[" ({rule}_item ({json.dumps(tags.between)} {rule}_item)*)? "]"'
        items = schema.get("items", {})
        yield from replace(self, tags=tags)._argument(
            f"{rule}_item", "", items, f"items of {where}"
        )


def _log_ignored(schema: Mapping[str, Any], bound: set[str], where: str) -> None:
    """Log the keywords of a schema that arguments between tags are not constrained to."""
    if unknown := [key[:80] for key in schema if key not in bound]:
        log_once("%s are not bound to %s in calls of this model", where, ", ".join(unknown))


def _pattern(pattern: str) -> str:
    """Turn a schema's pattern, which may match any part, into one that matches the full string."""
    begun, ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith(r"\$")
    inner = re.sub(r"(?<!\\)/", r"\/", pattern[begun : len(pattern) - ended])
    return f"/{'' if begun else ANYTHING}({inner}){'' if ended else ANYTHING}/"


NO_PARAMETERS: Body = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,2}/"
"""Line breaks after the reasoning."""


def grammar_of(tools: Tools, markers: Markers, *, thought: Thought) -> str:
    """Return the grammar of completions that call one of `tools.must`. Raises Problem if there is
    no grammar for the model's format of calls."""
    calls = markers.calls
    assert calls is not None, "markers_of found no format of calls"
    grammar = calls.grammar
    if grammar is None:
        raise unsupported(
            "tool_choice",
            f"calls as this model writes them ({calls.name}) can be read, and not be asked for: "
            "tool_choice must be auto or none",
        )
    parts = (grammar.between, grammar.first, grammar.last, grammar.after)
    between, first, last, after = (_lark(part, markers=markers) for part in parts)
    by_name = {tool["function"]["name"]: tool for tool in tools.listed}
    more = "" if tools.most_calls == 1 or grammar.single else f"({between} call)*"
    if more and between and not grammar.last:
        # After a call, a model may begin a new line and then end.
        more += f" ({between})?"
    thoughts, rules_of_thoughts = _thoughts(markers, thought)
    rules = [f"start: {thoughts} {first} call {more} {last}"]
    rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools.must))))
    tags = grammar.tags
    for at, name in enumerate(tools.must):
        rules.append(f"call_{at}: {_lark(grammar.before, name, markers)} arguments_{at} {after}")
        rule, tool = f"arguments_{at}", by_name[name]
        if tags is None:
            rules += _json(rule, tool)
            continue
        if not tags.names.fullmatch(name):
            raise unsupported("tools", f"calls of this model cannot have this name: {name}")
        rules += tagged_arguments(tags, rule, tool, markers)
    return "\n".join([*rules, *rules_of_thoughts])


def _call_or_schema(tools: Tools, markers: Markers, *, thought: Thought) -> str:
    """Return the grammar of completions that match `tools.schema` or are unconstrained calls."""
    assert markers.calls is not None, "markers_of found no format of calls"
    thoughts, rules = _thoughts(markers, thought)
    answer = f"{_answer_header(markers, thought)} schema"
    rules += [f"start: {thoughts} ({answer} | call)", _bound("schema", json.loads(tools.schema))]
    free = " | ".join([ANY_TEXT, *(f"<[{id}]>" for id in markers.special)])
    return "\n".join([*rules, f"call: {_literal(markers.calls.begin.text, markers)} ({free})*"])


def _json(rule: str, tool: Tool) -> list[str]:
    return [_bound(rule, enforceable(tool["function"].get("parameters")) or NO_PARAMETERS)]


def _bound(rule: str, schema: Body) -> str:
    return f"{rule}: %json {json.dumps({**enforceable(schema), 'x-guidance': JSON_STYLE})}"


def _thoughts(markers: Markers, thought: Thought) -> tuple[str, list[str]]:
    """Return the terms before an answer or a call, and the rules that these terms refer to."""
    begin, end = markers.think_begin, markers.think_end
    if begin is None or end is None or thought in ("begun", "none"):
        return "", []
    gap = LINES if markers.channels is None else _literal(markers.channels.header.text, markers)
    if thought == "close":
        return f"{_literal(end.text, markers)} {gap}", []
    rest = f"thinking: {ANY_TEXT} {_literal(end.text, markers)}"
    if markers.special.keys().isdisjoint(end.ids):
        rest = f"thinking[suffix={json.dumps(end.text)}]: {ANY_TEXT}"
    before = f"thinking {gap}" if thought == "open" else f"(thought {gap})?"
    return before, [f"thought: {_literal(begin.text, markers)} thinking", rest]


def _answer_header(markers: Markers, thought: Thought) -> str:
    """Return the term for the header of an answer in a channel, or "" without channels."""
    if markers.channels is None or thought == "begun":
        return ""
    return _literal(markers.channels.answer.text, markers)


def _literal(text: str, markers: Markers) -> str:
    """Return the terms for a text: special tokens by their ids, and other parts as strings."""
    ids = {piece: id for id, piece in markers.special.items() if piece}
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part
    )
