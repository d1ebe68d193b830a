"""What the grammar of a demanded call allows after the first call."""

from typing import Any

import pytest

from mlx_specdec.core.constraint import Alphabet, Constraint
from mlx_specdec.core.grammar import compiled
from mlx_specdec.serve.events import Reader
from mlx_specdec.serve.internal import Tools, grammar_of
from mlx_specdec.text.markers import Markers

from ..support.tools import TOOLS
from .test_events import of_parser

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

PIECES = ("<end>", *map(chr, (10, *range(32, 127))), "｜", "▁")
ALPHABET = Alphabet(
    [piece.encode() for piece in PIECES], {0}, lambda text: [PIECES.index(each) for each in text]
)
CALLS = {
    "json_tools": ('<tool_call>\n{"name": "drop", "arguments": {}}\n</tool_call>', "\n"),
    "mistral": ('[TOOL_CALLS][{"name": "drop", "arguments": {}}]', ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>drop\n```json\n{}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>drop<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
    ),
    "granite": ('<|tool_call|>[{"name": "drop", "arguments": {}}]', ""),
    "llama3_json": ('{"name": "drop", "parameters": {}}', ""),
    "phi4_mini_json": ('<|tool_call|>[{"name": "drop", "arguments": {}}]<|/tool_call|>', ""),
}
"""A call of `drop` in each format, and what stands between two calls."""


def constraint_of(
    name: str, most_calls: int | None, *, open_end: bool = False, tool: Any = TOOLS[1]
) -> Constraint:
    tools = Tools((tool,), (tool["function"]["name"],), most_calls)
    text = grammar_of(tools, Markers(calls=of_parser(name)))
    grammar = compiled(None, None, text)
    assert grammar is not None
    return ALPHABET.constraint(grammar, ends=[0], open_end=open_end)


def take(constraint: Constraint, text: str) -> None:
    assert constraint.take([PIECES.index(letter) for letter in text]) == len(text), text


def allowed(constraint: Constraint) -> set[str]:
    [row] = constraint.masks([])
    return {piece for at, piece in enumerate(PIECES) if row[at]}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("most_calls", [1, None])
def test_a_model_may_end_after_its_first_call_and_after_a_line_break(
    name: str, most_calls: int | None
) -> None:
    call, between = CALLS[name]
    constraint = constraint_of(name, most_calls)
    take(constraint, call)
    assert "<end>" in allowed(constraint)
    reader = Reader(Markers(calls=of_parser(name)), TOOLS)
    read = [each for each in reader.read(call) + reader.read(None) if each.kind == "call"]
    assert [each.name for each in read] == ["drop"]
    if most_calls == 1:
        assert allowed(constraint) == {"<end>"}
    elif between:
        take(constraint, between)
        # A line break is no promise of another call.
        assert allowed(constraint) == {"<end>", call[0]}
        take(constraint, call)
        assert "<end>" in allowed(constraint)


@pytest.mark.parametrize("name", CALLS)
def test_a_text_that_is_no_further_call_ends_the_answer(name: str) -> None:
    call, between = CALLS[name]
    constraint = constraint_of(name, None, open_end=True)
    for letter in call:
        # Within a call, the grammar decides.
        assert allowed(constraint) != {*PIECES}
        take(constraint, letter)
    for text in [between, call] if between else []:
        assert allowed(constraint) == {*PIECES}
        take(constraint, text)
    assert allowed(constraint) == {*PIECES} and not constraint.complete
    # The first token that begins no call ends the answer, also in a draft.
    drafted = [PIECES.index(letter) for letter in "Done"]
    assert constraint.verifiable(drafted) == 1
    assert constraint.take(drafted) == 0 and constraint.complete
