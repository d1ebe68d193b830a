"""Texts with thoughts and tool calls in many formats, and how they are read."""

import json
from collections.abc import Sequence
from typing import Any

Said = tuple[str, str, list[Any]]
"""The content of an answer, its thought, and its calls."""
JSON = '<tool_call>\n{"name": "get", "arguments": {"city": "Bonn"}}\n</tool_call>'
BONN = ("get", {"city": "Bonn"})
SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
BEGIN, SEPARATOR, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
ROME = ("get", {"city": 'R"}me <'})
BONN_TEXT, ROME_TEXT = (json.dumps(arguments) for _, arguments in (BONN, ROME))
BOTH = [BONN, ROME]


def listed(key: str = "arguments", *, texts: Sequence[str] = (BONN_TEXT, ROME_TEXT)) -> list[str]:
    return [f'{{"name": "get", "{key}": {text}}}' for text in texts]


def v3(*texts: str) -> str:
    calls = [f"{BEGIN}function{SEPARATOR}get\n```json\n{text}\n```{END}" for text in texts]
    return SECTION[0] + "\n".join(calls) + SECTION[1]


def v31(*texts: str) -> str:
    calls = [f"{BEGIN}get{SEPARATOR}{text}{END}" for text in texts]
    return SECTION[0] + "".join(calls) + SECTION[1]


SEED = (
    "<seed:tool_call>\n<function=get>\n<parameter=city>Bonn</parameter>\n</function>\n"
    "</seed:tool_call>"
)
LIST = f"[{', '.join(listed())}]"
PARAMETERS = listed("parameters")
VARIETIES: list[tuple[str, str, str, list[Any]]] = [
    ("deepseek_v3", f"Look.{v3(BONN_TEXT, ROME_TEXT)}", "Look.", BOTH),
    ("deepseek_v3", v31(BONN_TEXT, ROME_TEXT), "", BOTH),
    ("deepseek_v31", f"Look.{v31(BONN_TEXT, ROME_TEXT)}", "Look.", BOTH),
    ("deepseek_v31", v3(BONN_TEXT), "", [BONN]),
    ("deepseek_v31", f"{SECTION[0]}x{SECTION[1]}", f"{SECTION[0]}x{SECTION[1]}", []),
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
THOUGHTS_AND_CALLS: list[tuple[str, str, Said]] = [
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
THOUGHT_BEFORE = f"<think>{PARAMETERS[1]}</think>\n\n{PARAMETERS[0]}"
TEXTS: list[tuple[str, str, Said]] = [
    *THOUGHTS_AND_CALLS,
    *((name, text, (said, "", calls)) for name, text, said, calls in VARIETIES),
    ("llama3_json", THOUGHT_BEFORE, ("", PARAMETERS[1], [BONN])),
]
"""Texts by their format. A model that writes one also has the tokens <think> and </think>."""
