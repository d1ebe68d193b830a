"""The internal request: what a client asks for, whatever API it uses, and the constraints on
completions that come from requests and from demanded tool calls."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field

from ..core.grammar import JSON_STYLE, enforceable, rule_of
from ..core.options import (
    LARGEST_BIAS,
    LEAST_TOP_P,
    MOST_DRAFTED,
    REPETITION_PENALTIES,
    TEMPERATURE_LIMITS,
    Options,
)
from ..engine.pair import Pair
from ..engine.request import for_model
from ..errors import OptionError
from ..text.chat import Ending
from ..text.markers import ANSWER, BEGIN, CHANNEL, END, HEADER, Markers, Parts
from ..text.messages import Message, Tool
from .fields import ENTRIES, Boolean, Fields, Object, Refused, Several, either, number
from .problems import invalid

Limit = Annotated[int, Field(ge=-1), number]
"""A largest number, or -1 for no limit."""
Count = Annotated[int, Field(ge=1), number]
Penalty = Annotated[float, Field(ge=-LARGEST_BIAS, le=LARGEST_BIAS), number]
Factor = Annotated[float, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1]), number]
Share = Annotated[float, Field(ge=0, le=1), number]

_or_ban = AfterValidator(lambda bias: -math.inf if bias < -LARGEST_BIAS else bias)
Bias = Annotated[float, Field(le=LARGEST_BIAS), _or_ban]
"""A bias, which has no lower limit: a very low one excludes a token."""
Biases = Annotated[dict[Annotated[int, Field(ge=0)], Bias], Field(max_length=ENTRIES)]
SCHEMA_BYTES, SCHEMA_DEPTH = 64 << 10, 64
"""Largest size of a schema or a grammar, and largest number of nested brackets of a schema."""
Thought = Literal["begun", "none", "optional", "open", "close"]
"""The text before an answer. begun: Nothing, since the prompt already begins the answer. none: No
thought. optional: A thought, if the model opens one. open: The rest of a thought that the prompt
has opened. close: Only the end of such a thought, since the request turns reasoning off."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = r"/(.|\n)*/"
LINES = r"/\n{0,2}/"
"""Line breaks after the reasoning."""
ConstraintKind = Literal["json_schema", "regex", "grammar"]


class Speculative(Fields, extra="forbid"):
    """The largest number of draft tokens in a round."""

    max: Annotated[int, Field(ge=0, le=MOST_DRAFTED), number] | None = None


class Sampled(Fields):
    """Settings of sampling, and of the end of a completion, with the values of Options. A field
    that is None has the default of the server."""

    refused: ClassVar[Refused] = {
        **dict.fromkeys(("adapter_id", "adapters", "allowed_token_ids", "audio", "container"), ()),
        **dict.fromkeys(("chat_template", "frequency_context_size", "json_schema"), ()),
        **dict.fromkeys(("presence_context_size", "repetition_context_size", "role_mapping"), ()),
        **dict.fromkeys(("bad_words", "documents", "mcp_servers", "stop_token_ids"), ([],)),
        **dict.fromkeys(("dry_multiplier", "dynatemp_range", "min_tokens", "mirostat"), (0,)),
        **dict.fromkeys(("background", "decoder_input_details", "use_beam_search"), (False,)),
        **dict.fromkeys(("include_stop_str_in_output", "watermark"), (False,)),
        **dict.fromkeys(("tfs_z", "typical_p"), (1,)),
        "modalities": (["text"],),
        "skip_special_tokens": (True,),
        "top_n_tokens": (0,),
        "web_search_options": (),
    }
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1), number] | None = None
    temperature: Annotated[float, Field(ge=0, le=TEMPERATURE_LIMITS[1]), number] | None = None
    # With 0, only the likeliest token remains.
    top_p: Annotated[Share, AfterValidator(lambda share: share or LEAST_TOP_P)] | None = None
    top_k: Annotated[Limit, AfterValidator(lambda most: max(0, most))] | None = None
    min_p: Share | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=0.5), number] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Factor | None = either(None, "repetition_penalty", "repeat_penalty")
    repeat_last_n: Limit | None = None
    logit_bias: Biases | None = None
    stop: str | Several[str] = ""
    max_tokens: Limit | None = None
    ignore_eos: Boolean = False
    exact: Boolean | None = None
    target_lang: str | None = None
    source_lang: str | None = None
    truncate_prompt_tokens: Count | None = None
    # `false` means no drafts.
    speculative: Boolean | Speculative = True


@dataclass(frozen=True)
class TextConstraint:
    """A schema, a regular expression or a grammar that a text has to match. kind: The name of the
    option. field: The field of the body."""

    kind: ConstraintKind
    value: str | Object
    field: str = "response_format"

    @property
    def text(self) -> str:
        """The text of the constraint, which is JSON for a schema."""
        value = self.value
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class ToolChoice:
    """Which tools the model may or must call.

    Attributes:
        name: The only tool that may be called, which must be called, or "".
        allowed: The names of the tools that it sees, or None for all.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    name: str = ""
    allowed: frozenset[str] | None = None


@dataclass(frozen=True)
class Tools:
    """The tools that the model may call.

    Attributes:
        listed: The tools, in the format of chat templates.
        must: If a call is demanded, the names of the tools that may be called, or else ().
        most_calls: Largest number of calls, or None for any number.
    """

    listed: tuple[Tool, ...] = ()
    must: tuple[str, ...] = ()
    most_calls: int | None = None

    @classmethod
    def of(cls, tools: Iterable[Tool], choice: ToolChoice, parallel: bool | None = None) -> Self:
        """Return the tools of a chat. A later tool replaces a tool of the same name. parallel:
        Whether an answer may have several calls, which is the default. Raises Problem."""
        named = {tool["function"]["name"]: tool for tool in tools}
        demanded = choice.mode == "required"
        if choice.allowed is not None:
            named = {name: tool for name, tool in named.items() if name in choice.allowed}
            if not named:
                raise invalid("tool_choice allows none of the functions in tools", "tool_choice")
        if demanded and not named:
            raise invalid("tool_choice asks for a call: give tools", "tool_choice")
        if choice.name and choice.name not in named:
            message = f"tool_choice names {choice.name:.80}, which is none of the functions"
            raise invalid(message, "tool_choice")
        if choice.mode == "none":
            return cls()  # the model does not call a tool that is not in its prompt
        must = (choice.name,) if choice.name else tuple(named) if demanded else ()
        most = 1 if choice.name or parallel is False else None
        return cls(tuple(named.values()), must, most)


@dataclass(frozen=True)
class Chat:
    """A conversation that the model continues.

    Attributes:
        messages: The messages, as `text.messages.messages_of` reads them.
        variables: Variables of the chat template.
        thinking_budget: Largest number of tokens of thoughts, or None for the server's default.
        ending: How the prompt ends.
    """

    messages: Sequence[Message] = ()
    tools: Tools = Tools()
    variables: Mapping[str, Any] = field(default_factory=dict)
    thinking_budget: int | None = None
    ending: Ending = "answer"


@dataclass(frozen=True)
class Wanted:
    """The wishes of a client, except for the prompt.

    Attributes:
        constraints: At most one constraint, or the request is wrong.
        top_logprobs: Number of alternatives of each token, or None for no log-probabilities.
        count: Number of completions of each prompt.
        prediction: A text that the completion may turn out to have.
    """

    sampling: Sampled
    constraints: Sequence[TextConstraint] = ()
    top_logprobs: int | None = None
    count: int = 1
    prediction: str = ""


def constrained(
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
    marks = [CHANNEL, *markers.think]
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
        return f"{_literal(end, markers)} {gap}", []
    rest = f"thinking: {ANY_TEXT} {_literal(end, markers)}"
    if markers.special.keys().isdisjoint(markers.think[end]):
        rest = f"thinking[suffix={json.dumps(end)}]: {ANY_TEXT}"
    before = f"thinking {gap}" if thought == "open" else f"(thought {gap})?"
    return before, [f"thought: {_literal(begin, markers)} thinking", rest]


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
