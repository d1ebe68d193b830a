"""Constraints on completions: they come from requests and from demanded tool calls."""

import json
import re
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from ..core.grammar import JSON_STYLE, enforceable, rule_of
from ..core.options import Options
from ..engine.pair import Pair
from ..engine.request import for_model
from ..errors import OptionError
from ..text.markers import ANSWER, BEGIN, CHANNEL, END, HEADER, Markers, Parts
from .internal import TextConstraint, Tools
from .problems import invalid

SCHEMA_BYTES, SCHEMA_DEPTH = 64 << 10, 64
"""Largest size of a schema or a grammar, and largest number of nested brackets of a schema."""
Thought = Literal["begun", "none", "optional", "open", "close"]
"""The text before an answer. begun: Nothing, since the prompt already begins the answer. none: No
thought. optional: A thought, if the model opens one. open: The rest of a thought that the prompt
has opened. close: Only the end of such a thought, since the request turns reasoning off."""


def bound(
    options: Options, tools: Tools, markers: Markers, pair: Pair, thought: Thought
) -> Options:
    """Return options whose constraint begins after the thought. If a call is demanded, or if tools
    may be called instead of an answer that matches a schema, they have a grammar of calls. A
    grammar that contains the markers is not changed. Raises Problem."""
    if tools.must:
        _check_size(TextConstraint("json_schema", json.dumps(tools.listed), "tools"))
    if tools.must or (tools.listed and options.json_schema is not None):
        text = grammar_of(tools, markers, thought, options.json_schema)
        field = "tools" if tools.must else "response_format"
        free = replace(options, json_schema=None)
        return checked(pair, free, TextConstraint("grammar", text, field))
    written = f"{options.regex or ''}{options.grammar or ''}"
    marks = [CHANNEL, *(marker.text for marker in markers.think)]
    (thoughts, rules), header = _thoughts(markers, thought), _answer_header(markers, thought)
    before, grammar = f"{thoughts} {header}".strip(), options.constraint
    if grammar is None or not before or any(mark in written for mark in marks):
        return options
    text = "\n".join([f"start: {before} answer", rule_of("answer", grammar), *rules])
    try:
        return replace(options, json_schema=None, regex=None, grammar=text)
    except OptionError as error:
        raise invalid(f"after the thought, {error}", "response_format") from None


def checked(pair: Pair, options: Options, constraint: TextConstraint) -> Options:
    """Return the options with a constraint that the model can satisfy. Raises Problem, which names
    the field."""
    _check_size(constraint)
    changes: dict[str, Any] = {constraint.kind: constraint.text}
    try:
        options = replace(options, **changes)
        for_model(pair, options)
    except OptionError as error:
        raise invalid(str(error), constraint.field) from None
    return options


def _check_size(constraint: TextConstraint) -> None:
    """Raise Problem for a constraint that would take long to compile."""
    text, field = constraint.text, constraint.field
    if len(text.encode()) > SCHEMA_BYTES:
        raise invalid(f"{field} has more than {SCHEMA_BYTES} bytes: shorten it", field)
    schema = text if constraint.kind == "json_schema" else ""
    outside_strings = re.sub(r'"(?:[^"\\]|\\.)*"', "", schema)
    depths = accumulate((character in "[{") - (character in "]}") for character in outside_strings)
    if max(depths, default=0) > SCHEMA_DEPTH:
        raise invalid(f"{field} is nested more than {SCHEMA_DEPTH} deep", field)


def _lark(parts: Parts, markers: Markers, name: str = "") -> str:
    """Return a sequence in Lark's syntax. name: The name of a function, for NAME."""
    calls = markers.calls
    marks = {} if calls is None else {BEGIN: calls.begin, END: calls.end}
    return " ".join(
        part
        if part.startswith("/")
        else _literal(marks.get(part, part.replace("NAME", name)), markers)
        for part in parts
    )


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,2}/"
"""Line breaks after the reasoning."""


def grammar_of(
    tools: Tools, markers: Markers, thought: Thought = "none", schema: object = None
) -> str:
    """Return the grammar of completions that call one of `tools.must`, or that call any tool or
    match a schema. If the model's calls have no grammar, or if none is demanded, their text is free
    after the begin marker."""
    calls = markers.calls
    assert calls is not None, "markers_of found no format of calls"
    thoughts, rules_of_thoughts = _thoughts(markers, thought)
    if not calls.before or schema:
        free = " | ".join([ANY_TEXT, *(f"<[{id}]>" for id in markers.special)])
        rules = [f"call: {_literal(calls.begin, markers)} ({free})*", *rules_of_thoughts]
        start = "call"
        if schema:
            start = f"({_answer_header(markers, thought)} schema | call)"
            rules.append(_bound("schema", json.loads(str(schema))))
        return "\n".join([f"start: {thoughts} {start}", *rules])
    parts = (calls.between, calls.first, calls.last, calls.after)
    between, first, last, after = (_lark(part, markers) for part in parts)
    by_name = {tool["function"]["name"]: tool for tool in tools.listed}
    more = "" if tools.most_calls == 1 or calls.single else f"({between} call)*"
    if more and between and not calls.last:
        # After a call, a model may begin a new line and then end.
        more += f" ({between})?"
    rules = [f"start: {thoughts} {first} call {more} {last}"]
    rules.append("call: " + " | ".join(f"call_{at}" for at in range(len(tools.must))))
    for at, name in enumerate(tools.must):
        rules.append(f"call_{at}: {_lark(calls.before, markers, name)} arguments_{at} {after}")
        rules.append(_bound(f"arguments_{at}", by_name[name]["function"].get("parameters")))
    return "\n".join([*rules, *rules_of_thoughts])


def _bound(rule: str, schema: Any) -> str:
    bound = {**(enforceable(schema) or NO_PARAMETERS), "x-guidance": JSON_STYLE}
    return f"{rule}: %json {json.dumps(bound)}"


def _thoughts(markers: Markers, thought: Thought) -> tuple[str, list[str]]:
    """Return the terms before an answer or a call, and the rules that these terms refer to."""
    if not markers.think or thought in ("begun", "none"):
        return "", []
    begin, end = markers.think
    gap = _literal(HEADER, markers) if markers.channels else LINES
    if thought == "close":
        return f"{_literal(end.text, markers)} {gap}", []
    rest = f"thinking: {ANY_TEXT} {_literal(end.text, markers)}"
    if markers.special.keys().isdisjoint(end.ids):
        rest = f"thinking[suffix={json.dumps(end.text)}]: {ANY_TEXT}"
    before = f"thinking {gap}" if thought == "open" else f"(thought {gap})?"
    return before, [f"thought: {_literal(begin.text, markers)} thinking", rest]


def _answer_header(markers: Markers, thought: Thought) -> str:
    """Return the term for the header of an answer in a channel, or "" without channels."""
    return _literal(ANSWER, markers) if markers.channels and thought != "begun" else ""


def _literal(text: str, markers: Markers) -> str:
    """Return the terms for a text: special tokens by their ids, and other parts as strings."""
    ids = {piece: id for id, piece in markers.special.items() if piece}
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return " ".join(
        f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part
    )
