"""Thoughts and calls in texts, in whatever pieces they come."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from mlx_specdec.serve.events import Event, Reader, joined
from mlx_specdec.text.markers import OTHER_NAMES, TOOL_FORMATS, Markers, ToolFormat

from ..contract.call_texts import TEXTS, Said
from ..support.tools import GET_TOOLS

THINKING = Markers({"<think>": (5,), "</think>": (6,)})


def of_parser(name: str) -> ToolFormat:
    found = TOOL_FORMATS[OTHER_NAMES.get(name, name)]
    return replace(found, **found.without_inner)


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
    texts, calls = {"content": "", "reasoning": ""}, []
    for each in joined(events):
        if each.kind == "call":
            calls.append((each.name, json.loads(each.text)))
        else:
            texts[each.kind] += each.text
    return texts["content"], texts["reasoning"], calls


@pytest.mark.parametrize(("name", "text", "expected"), TEXTS, ids=lambda each: str(each)[:40])
def test_a_text_means_the_same_at_every_split(name: str, text: str, expected: Said) -> None:
    dice = random.Random(3)
    sizes = [[], [1] * len(text), *([place] for place in range(1, len(text)))]
    sizes += [[dice.randrange(1, 9) for _ in text] for _ in range(20)]
    for pieces in sizes:
        assert answer_to(read(text, pieces, name)) == expected, pieces


def test_ids_of_the_models_own_stay() -> None:
    [(_, text, _)] = [each for each in TEXTS if each[0] == "kimi_k2"]
    calls = [each for each in read(text, [], "kimi_k2") if each.kind == "call"]
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
    assert reader.read("<think> \n") == [Event("content", "<think> \n")]


@pytest.mark.parametrize("name", ["json_tools", "kimi_k2", "mistral"])
@pytest.mark.parametrize("word", ["a", "a-", " ", "a:1 ", "{ ", '{"name": "', "}a", "a:"])
def test_a_section_is_searched_once_whatever_its_pieces(name: str, word: str) -> None:
    """A million letters would take hours in quadratic time."""
    text = of_parser(name).begin + word * (1_000_000 // len(word)) + " x [ARGS]"
    assert answer_to(read(text, [10_000] * 50, name))[2] == []


def test_an_answer_in_json_is_not_held_back() -> None:
    reader = Reader(Markers(calls=of_parser("llama3_json")), GET_TOOLS)
    assert reader.read('{"na') == []
    assert reader.read('tion": ') == [Event("content", '{"nation":')]
