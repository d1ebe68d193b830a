"""Calls that a chat template writes are read as the same calls, in whatever pieces they come."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.serve.events import Event, Reader
from mlx_specdec.text.markers import Markers

from ..support.call_templates import TEMPLATES, written
from ..support.tools import function
from .test_events import of_parser

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "word": {"$ref": "#/$defs/word"},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "ratio": {"type": "number"},
        "sure": {"type": "boolean"},
        "items": {"type": "array"},
        "data": {"type": ["object", "null"]},
        "either": {"type": ["string", "integer"]},
    },
    "$defs": {"word": {"enum": ["null", "5", "a b"]}},
}
TOOLS = [function("edit", PARAMETERS), function("get_time", None)]
TAGS = (
    "</parameter>\n",
    "</parameter>\n</function>",
    "</function>",
    "</tool_call>",
    "<parameter=count>",
    "</arg_value>",
    "<arg_key>",
    "</param>",
    "]]></param>",
    "<![CDATA[",
    "]]>",
    "</invoke>",
    "<tool_call|>",
    "<|tool_call_end|>",
    "<end_function_call>",
    "</seed:tool_call>",
    "</longcat_tool_call>",
    "</minimax:tool_call>",
    "</atem:function_calls>",
    "<|tool_call_end|>",
    "}",
    "```",
)
CHARACTERS = st.characters(exclude_categories=("Cs",))
LINES = st.sampled_from(["\n", " ", "\t", "\r\n", "    return 1\n", "null", "None", "5", "[1]", ""])
TEXTS = st.one_of(
    st.text(CHARACTERS, max_size=12),
    st.lists(LINES, max_size=4).map("".join),
    st.sampled_from(TAGS).map(lambda tag: f"  a{tag}b \n"),
)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), inner, max_size=3),
    ),
    max_leaves=6,
)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "text": TEXTS,
    "word": st.sampled_from(["null", "5", "a b"]),
    "count": st.one_of(st.none(), st.integers()),
    "ratio": st.one_of(NUMBERS, st.integers()),
    "sure": st.booleans(),
    "items": st.lists(VALUES, max_size=3),
    "data": st.one_of(
        st.none(), st.dictionaries(st.from_regex("[a-z]{1,5}", fullmatch=True), VALUES, max_size=3)
    ),
    "either": st.one_of(st.integers(), st.sampled_from(["high", "a5", " \n x"])),
}
ARGUMENTS = st.fixed_dictionaries({}, optional=KINDS)
CALLS = st.lists(
    st.one_of(st.tuples(st.just("edit"), ARGUMENTS), st.just(("get_time", {}))),
    min_size=1,
    max_size=3,
)


def answer(events: list[Event]) -> tuple[str, list[tuple[str, Any]]]:
    """Return the content and the calls of an answer."""
    content = "".join(event.text for event in events if event.kind == "content")
    calls = [(event.name, json.loads(event.text)) for event in events if event.kind == "call"]
    return content, calls


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(calls=CALLS, cuts=st.lists(st.integers(0, 400), max_size=4))
def test_calls_are_read_as_they_were_written(
    template: str, calls: list[tuple[str, Any]], cuts: list[int]
) -> None:
    if template == "pythonic's quotes":
        # Backslashes are written as they are, so that only texts without them can be read.
        plain = re.compile(r'\\\\|\\"')
        calls = json.loads(plain.sub("", json.dumps(calls, ensure_ascii=False)))
        calls = [(name, arguments) for name, arguments in calls]
    if template == "llama3_json":
        calls = calls[:1]
    text = written(template, calls)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    reader = Reader(Markers(calls=of_parser(template.split("'")[0])), TOOLS)
    events = [event for piece in (*pieces, None) for event in reader.read(piece)]
    assert answer(events) == ("", calls), text
