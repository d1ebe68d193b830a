"""Tool calls in the formats of all families, demanded calls that parsers can read, and what the
grammar of a demanded call allows after the first call."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.sampling.constraint import Alphabet, Constraint
from mlx_specdec.sampling.grammar import compiled
from mlx_specdec.serve.chat import Tools
from mlx_specdec.serve.constraints import grammar_of
from mlx_specdec.serve.events import Arguments, Call, Reader, Text
from mlx_specdec.text.markers import Markers
from mlx_specdec.text.tool_formats import (
    DEEPSEEK,
    DEEPSEEK_INNER,
)

from ..support.serving import CHAT, client_of, ok, running, streamed
from ..support.tooled import GET_TOOLS, NAMED, TEMPLATE, make_tooled, of_parser
from ..support.tooled import TOOLS as KEEPING
from .test_events import BONN, answer_to, read

ROME = ("get", {"city": 'R"}me <'})
BONN_TEXT, ROME_TEXT = (json.dumps(arguments) for _, arguments in (BONN, ROME))
BOTH = [BONN, ROME]
BEGIN, SEPARATOR, END = DEEPSEEK_INNER


def listed(key: str = "arguments", *, texts: Sequence[str] = (BONN_TEXT, ROME_TEXT)) -> list[str]:
    return [f'{{"name": "get", "{key}": {text}}}' for text in texts]


def v3(*texts: str) -> str:
    calls = [f"{BEGIN}function{SEPARATOR}get\n```json\n{text}\n```{END}" for text in texts]
    return DEEPSEEK[0] + "\n".join(calls) + DEEPSEEK[1]


def v31(*texts: str) -> str:
    calls = [f"{BEGIN}get{SEPARATOR}{text}{END}" for text in texts]
    return DEEPSEEK[0] + "".join(calls) + DEEPSEEK[1]


SEED = (
    "<seed:tool_call>\n<function=get>\n<parameter=city>Bonn</parameter>\n</function>\n"
    "</seed:tool_call>"
)
LIST = f"[{', '.join(listed())}]"
PARAMETERS = listed("parameters")
TEXTS: list[tuple[str, str, str, list[Any]]] = [
    ("deepseek_v3", f"Look.{v3(BONN_TEXT, ROME_TEXT)}", "Look.", BOTH),
    ("deepseek_v3", v31(BONN_TEXT, ROME_TEXT), "", BOTH),
    ("deepseek_v31", f"Look.{v31(BONN_TEXT, ROME_TEXT)}", "Look.", BOTH),
    ("deepseek_v31", v3(BONN_TEXT), "", [BONN]),
    ("deepseek_v31", f"{DEEPSEEK[0]}x{DEEPSEEK[1]}", f"{DEEPSEEK[0]}x{DEEPSEEK[1]}", []),
    ("granite", f"<|tool_call|>{LIST}", "", BOTH),
    ("granite", f"Look.<tool_call>\n{LIST}", "Look.", BOTH),
    ("granite", "a <tool", "a <tool", []),
    ("llama3_json", PARAMETERS[0], "", [BONN]),
    ("llama3_json", f"\n{'; '.join(PARAMETERS)}", "", BOTH),
    ("llama3_json", f"<|python_tag|>{listed()[1]}", "", [ROME]),
    ("llama3_json", f'{{\n  "type": "function", {PARAMETERS[1][1:]}', "", [ROME]),
    ("llama3_json", f'{{"name": "get", {PARAMETERS[0][16:-1]}, "type": "function"}}', "", [BONN]),
    ("llama3_json", f"So: {PARAMETERS[0]}", f"So: {PARAMETERS[0]}", []),
    ("llama3_json", '\n{"name": "Bonn", "age": 7}', '\n{"name": "Bonn", "age": 7}', []),
    ("llama3_json", '{"nam', '{"nam', []),
    ("llama3_json", '{"names": []}', '{"names": []}', []),
    ("llama3_json", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("phi4_mini_json", f"<|tool_call|>{LIST}<|/tool_call|>", "", BOTH),
    ("phi4_mini_json", f"<|tool_call|>{listed()[0]}<|/tool_call|> Done.", "Done.", [BONN]),
    ("phi4_mini_json", f"functools{LIST}", "", BOTH),
    ("phi4_mini_json", "import functools\n", "import functools\n", []),
    ("seed_oss", f"Look.\n{SEED}\n{SEED}", "Look.", [BONN, BONN]),
]


@pytest.mark.parametrize(("name", "text", "said", "called"), TEXTS, ids=lambda each: str(each)[:40])
def test_a_text_means_the_same_at_every_split(
    name: str, text: str, said: str, called: list[Any]
) -> None:
    for sizes in ([], [1] * len(text), *([place] for place in range(1, len(text)))):
        assert answer_to(read(text, sizes, name)) == (said, "", called), sizes


def test_a_call_without_a_marker_may_follow_a_thought() -> None:
    text = f"<think>{PARAMETERS[1]}</think>\n\n{PARAMETERS[0]}"
    assert answer_to(read(text, [], "llama3_json")) == ("", PARAMETERS[1], [BONN])


def test_an_answer_in_json_is_not_held_back() -> None:
    reader = Reader(Markers(calls=of_parser("llama3_json")), GET_TOOLS)
    assert reader.read('{"na') == []
    assert reader.read('tion": ') == [Text("content", '{"nation":')]


SIGNS = {
    "deepseek_v3": (f"{DEEPSEEK[0]}```json", (*DEEPSEEK, *DEEPSEEK_INNER)),
    "deepseek_v31": (DEEPSEEK[0], (*DEEPSEEK, *DEEPSEEK_INNER)),
    "granite": ("<|tool_call|>", ("<|tool_call|>",)),
    "llama3_json": ('"parameters": dictionary of argument name', ("<|python_tag|>",)),
    "phi4_mini_json": ("<|/tool|>", ("<|tool_call|>", "<|/tool_call|>")),
}
"""What the template of each format shows, and its tokens."""
ARGUMENTS = r'\{"name": "[a-z]{1,4}", "age": \d{1,2}\}'


@pytest.mark.parametrize("name", SIGNS)
def test_a_call_can_be_requested_in_each_format(tmp_path: Path, name: str) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    shown, marks = SIGNS[name]
    template = TEMPLATE.replace("[tools]", f"[tools]{shown}").replace("tool_call", "call")
    template = template.replace(shown.replace("tool_call", "call"), shown)
    directory = make_tooled(tmp_path, template=template, special=True, marks=marks)
    with running((directory, None)) as engine:
        client = client_of(engine)
        body = {"messages": [{"role": "user", "content": "Who?"}], "tools": KEEPING}
        body |= {"tool_choice": NAMED, "temperature": 1.0, "seed": 3, "max_tokens": 250}
        [choice] = ok(client, CHAT, **body)["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and not choice["message"]["content"]
        assert call["function"]["name"] == "keep"
        assert re.fullmatch(ARGUMENTS, call["function"]["arguments"])
        chunks = streamed(client, CHAT, **body, speculative=False)
        deltas = [each["choices"][0]["delta"] for each in chunks]
        parts = [part["function"] for each in deltas for part in each.get("tool_calls", [])]
        assert "".join(part["arguments"] for part in parts) == call["function"]["arguments"]


def prompt_of(client: TestClient, messages: list[dict[str, Any]]) -> str:
    tokens = ok(client, "/tokenize", messages=messages, tools=KEEPING)["tokens"]
    return ok(client, "/detokenize", tokens=tokens)["content"]


USER = {"role": "user", "content": "Who?"}
ROLES = "{{ '<|' + m.role + '|>' + m.content }}"
PHI = (
    "{% for m in messages %}{% if m.role == 'system' and 'tools' in m and m.tools is not none %}"
    "{{ '<|system|>' + m.content + '<|tool|>' + m.tools + '<|/tool|>' }}"
    f"{{% else %}}{ROLES}{{% endif %}}{{% endfor %}}"
)


def test_a_template_may_read_the_tools_in_the_message_of_the_system(tmp_path: Path) -> None:
    with running((make_tooled(tmp_path, template=PHI), None)) as engine:
        client = client_of(engine)
        for messages, text in (
            ([USER], ""),
            ([{"role": "system", "content": "Be calm."}, USER], "Be calm."),
        ):
            prompt = prompt_of(client, messages)
            begin, _, rest = prompt.partition("<|tool|>")
            assert begin == f"<|system|>{text}"
            listed, _, rest = rest.partition("<|/tool|>")
            assert [tool["name"] for tool in json.loads(listed)] == ["keep", "drop"]
            assert rest == "<|user|>Who?"


def test_a_template_may_take_arguments_as_text(tmp_path: Path) -> None:
    template = (
        f"{DEEPSEEK[0]}{{% if tools %}}[tools]{{% endif %}}{{% for m in messages %}}"
        "{% if m.tool_calls %}{% for call in m.tool_calls %}"
        "{{ call.function.name + '(' + call.function.arguments + ')' }}{% endfor %}"
        f"{{% else %}}{ROLES}{{% endif %}}{{% endfor %}}"
    )
    call = {"type": "function", "function": {"name": "keep", "arguments": '{"name": "é"}'}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with running((make_tooled(tmp_path, template=template), None)) as engine:
        assert 'keep({"name": "é"})' in prompt_of(client_of(engine), messages)


def test_a_format_may_be_named_for_a_model_that_does_not_show_it(tmp_path: Path) -> None:
    template = TEMPLATE.replace("tool_call", "call")
    body = {"messages": [USER], "tools": KEEPING, "tool_choice": NAMED, "max_tokens": 120}
    with running((make_tooled(tmp_path, template=template), None)) as engine:
        answer = client_of(engine).post(CHAT, json=body)
        assert answer.status_code == 400 and "--tool-call-parser" in answer.text
        client = client_of(engine, tool_call_parser="llama3_json")
        [call] = ok(client, CHAT, **body)["choices"][0]["message"]["tool_calls"]
        assert re.fullmatch(ARGUMENTS, call["function"]["arguments"])


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
    name: str, most_calls: int | None, *, open_end: bool = False, tool: Any = KEEPING[1]
) -> Constraint:
    tools = Tools((tool,), (tool["function"]["name"],), most_calls)
    text = grammar_of(tools, Markers(calls=of_parser(name)), thought="none")
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
    reader = Reader(Markers(calls=of_parser(name)), KEEPING)
    read = [each for each in reader.read(call) + reader.read(None) if isinstance(each, Call)]
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


WORDS = {"type": "string", "minLength": 1, "maxLength": 4}
VARIED = {
    "type": "object",
    "properties": {
        "note": WORDS,
        "mood": {"enum": ["calm", "loud"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "sure": {"type": "boolean"},
    },
    "required": ["age"],
    "additionalProperties": False,
}
INNER = {
    "type": "object",
    "properties": {"word": WORDS, "sure": {"type": "boolean"}},
    "additionalProperties": False,
}
LISTS = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": WORDS}, "inner": INNER},
    "required": ["words", "inner"],
    "additionalProperties": False,
}


def written(constraint: Constraint, choices: random.Random) -> str:
    """A text that the constraint allows, letter by letter at random."""
    text = ""
    while (options := sorted(allowed(constraint))) != ["<end>"]:
        # Ends of strings and lists are rare among all letters.
        closing = [each for each in options if each in '<"}])'] if choices.random() < 0.3 else []
        letter = choices.choice(closing or [each for each in options if each != "<end>"])
        take(constraint, letter)
        text += letter
    return text


def fits(value: Any, schema: Any) -> bool:
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        keys = {*schema.get("required", ())} <= value.keys() <= schema["properties"].keys()
        return keys and all(fits(value[key], schema["properties"][key]) for key in value)
    if schema["type"] == "array":
        return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
    kinds = {"string": str, "integer": int, "boolean": bool}
    return type(value) is kinds[schema["type"]]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("schema", [VARIED, LISTS], ids=["varied", "lists"])
def test_a_parser_reads_what_the_grammar_writes(name: str, schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "keep", "parameters": schema}}
    choices = random.Random(7)
    for _ in range(3):
        text = written(constraint_of(name, 1, tool=tool), choices)
        reader = Reader(Markers(calls=of_parser(name)), [tool])
        events = reader.read(text) + reader.read(None)
        assert isinstance(events[0], Call), text
        arguments = "".join(event.text for event in events if isinstance(event, Arguments))
        assert fits(json.loads(arguments), schema), text
