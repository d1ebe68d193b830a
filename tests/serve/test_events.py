"""Thoughts and calls in texts, in whatever pieces they come."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from mlx_specdec.serve.events import Call, Event, Reader, Text, joined
from mlx_specdec.text.markers import Marker, Markers

from ..support.tooled import GET_TOOLS, of_parser

THINKING = Markers(Marker("<think>", (5,)), Marker("</think>", (6,)))
JSON = '<tool_call>\n{"name": "get", "arguments": {"city": "Bonn"}}\n</tool_call>'
BONN = ("get", {"city": "Bonn"})


def read(text: str, sizes: list[int], name: str = "json_tools", **more: Any) -> list[Event]:
    """What is read of a text that comes in pieces of these sizes."""
    reader = Reader(replace(THINKING, calls=of_parser(name)), GET_TOOLS, **more)
    events, at = [], 0
    for size in sizes:
        events += reader.read(text[at : at + size])
        at += size
    return events + reader.read(text[at:]) + reader.read(None)


def answer_to(events: list[Event]) -> tuple[str, str, list[tuple[str, Any]]]:
    """What was said, what was thought, and what was called."""
    texts, names, arguments = {"content": "", "reasoning": ""}, [], []
    for each in joined(events):
        if isinstance(each, Text):
            texts[each.kind] += each.text
        elif isinstance(each, Call):
            names.append(each.name)
        else:
            arguments.append(json.loads(each.text))
    return texts["content"], texts["reasoning"], [*zip(names, arguments, strict=True)]


TEXTS = [
    ("json_tools", "Just  a text. \n", ("Just  a text. \n", "", [])),
    ("json_tools", " a < b and <tool", (" a < b and <tool", "", [])),
    ("json_tools", f"Look.\n{JSON}", ("Look.", "", [BONN])),
    ("json_tools", f"{JSON}\n{JSON}\n", ("", "", [BONN, BONN])),
    ("json_tools", f"<think>\nHm.\n</think>\n\n{JSON}", ("", "Hm.", [BONN])),
    ("json_tools", "<think>Hm.</think>So.", ("So.", "Hm.", [])),
    ("json_tools", "<think>It never", ("", "It never", [])),
    (
        "json_tools",
        '<tool_call>{"name":"get","arguments":{"city":"a</tool_call>{\\"}b","n":[{}]}}</tool_call>!',
        ("!", "", [("get", {"city": 'a</tool_call>{"}b', "n": [{}]})]),
    ),
    (
        "json_tools",
        '<tool_call>{"arguments": {"city": "Bonn"}, "name": "get"}</tool_call>',
        ("", "", [BONN]),
    ),
    (
        "json_tools",
        "<tool_call>nothing of the kind</tool_call> more",
        ("<tool_call>nothing of the kind</tool_call>more", "", []),
    ),
    ("json_tools", "<tool_call>cut", ("<tool_call>cut", "", [])),
    (
        "qwen3_coder",
        "<tool_call>\n<function=get>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>",
        ("", "", [BONN]),
    ),
    (
        "pythonic",
        'Yes.<|tool_call_start|>[get(city="Bonn"), get(city="Bonn")]<|tool_call_end|>',
        ("Yes.", "", [BONN, BONN]),
    ),
    (
        "mistral",
        '[TOOL_CALLS]get[ARGS]{"city": "Bonn"}[TOOL_CALLS]get[ARGS]{"city": "Bonn"}',
        ("", "", [BONN, BONN]),
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get", "arguments": {"city": "Bonn"}}, '
        '{"name": "get", "arguments": {"city": "Bonn"}}]',
        ("", "", [BONN, BONN]),
    ),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
        '<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|><|tool_call_begin|>'
        'functions.get:1<|tool_call_argument_begin|>{"city": "Bonn"}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        ("", "", [BONN, BONN]),
    ),
    (
        "function_gemma",
        "<start_function_call>call:get{city:<escape>Bonn<escape>}<end_function_call>",
        ("", "", [BONN]),
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS, ids=lambda each: str(each)[:30])
def test_a_text_means_the_same_in_any_pieces(name: str, text: str, expected: object) -> None:
    dice = random.Random(3)
    assert answer_to(read(text, [], name)) == expected
    assert answer_to(read(text, [1] * len(text), name)) == expected
    for _ in range(20):
        sizes = [dice.randrange(1, 9) for _ in range(len(text))]
        assert answer_to(read(text, sizes, name)) == expected


def test_ids_of_the_models_own_stay() -> None:
    [(_, text, _)] = [each for each in TEXTS if each[0] == "kimi_k2"]
    calls = [each for each in read(text, [], "kimi_k2") if isinstance(each, Call)]
    assert [(each.id, each.index) for each in calls] == [
        ("functions.get:0", 0),
        ("functions.get:1", 1),
    ]


def test_a_text_may_begin_within_a_thought() -> None:
    text = "\nHm.</think>\nYes."
    assert answer_to(read(text, [1] * 30, thinking=True)) == ("Yes.", "Hm.", [])
    assert answer_to(read("Hm. ", [], thinking=True)) == ("", "Hm. ", [])


def test_without_marks_nothing_is_held_back() -> None:
    reader = Reader(Markers())
    assert reader.read("<think> \n") == [Text("content", "<think> \n")]


@pytest.mark.parametrize("name", ["json_tools", "kimi_k2", "mistral"])
@pytest.mark.parametrize("word", ["a", "a-", " ", "a:1 ", "{ ", '{"name": "', "}a", "a:"])
def test_a_section_is_searched_once_whatever_its_pieces(name: str, word: str) -> None:
    """A million letters would take hours in quadratic time."""
    text = of_parser(name).begin.text + word * (1_000_000 // len(word)) + " x [ARGS]"
    assert answer_to(read(text, [10_000] * 50, name))[2] == []
