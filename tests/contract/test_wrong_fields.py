"""A request with a wrong field is refused before anything is decoded, and the error names the
field."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..support.tools import ANTHROPIC, NAMED, SCHEMA, TOOLS, function
from .zoo import CHAT, COMPLETIONS, MESSAGES, RESPONSES, USER, Model

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

UNSUPPORTED = "unsupported_parameter"
TOO_LONG = "context_length_exceeded"
IMAGE = "data:image/png;base64,iVBORw0KGgo="
SOURCE = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
FLAT = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
BEGUN = {"role": "assistant", "content": "It is "}
CALLED = {**BEGUN, "tool_calls": [{"function": {"name": "keep", "arguments": "{}"}}]}
NAMELESS = {"name": "x", "arguments": "{}", "call_id": "1"}
SCORED = {"max_tokens": 1, "logprobs": 1, "echo": True}
OBJECT = "response_format"


def deep(levels: int) -> Any:
    """Return a schema that is nested so many levels deep."""
    schema: Any = {"type": "integer"}
    for _ in range(levels - 1):
        schema = {"items": schema}
    return schema


FIELDS: dict[str, list[Any]] = {
    "prompt": ["", [], 5, [[1], 2], [10**9]],
    "n": [0, 17],
    "stream": [1],
    "stream_options": [[]],
    "temperature": [-1, True, "hot", 1e-46, 1e300],
    "top_p": [1.5, 1e-46],
    "top_k": [1.5],
    "seed": [1.5, 2**70],
    "max_tokens": [-2, 1.5],
    "stop": [5, ["a"] * 17, "a" * 2000],
    "logit_bias": [{"a": 1}, {"": None}, {"1": 1e39}, {"1": "much"}],
    "logprobs": [21, True],
    "exact": ["yes"],
    "speculative": [3, {"max": 99}],
    "presence_penalty": [-1e39],
    "prediction": [{"type": "guess"}],
    "source_lang": ["fr"],
    "echo": ["yes"],
}
"""Wrong values of the fields of a completion."""
NOT_SUPPORTED: dict[str, Any] = {
    "tools": [{"type": "function"}],
    "min_tokens": 3,
    "stop_token_ids": [5],
    "bad_words": ["a"],
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
    "use_beam_search": 1,
    "add_special_tokens": False,
    "repetition_context_size": 20,
    "n_predict": 5,
    "adapters": "my/lora",
}
COMPLETION: list[tuple[Any, ...]] = [
    *(({name: value}, name) for name, values in FIELDS.items() for value in values),
    *(({name: value}, name, name, UNSUPPORTED) for name, value in NOT_SUPPORTED.items()),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["x"] * 9, "n": 2}, "prompt"),
    ({"n": 2, "best_of": 3}, "best_of"),
    *(
        ({"prompt": prompt, "target_lang": "fr"}, "target_lang")
        for prompt in ("x", [5, 9], ["x", "y"])
    ),
    ({"prompt": [7] * 4096}, "prompt", "", TOO_LONG),
    ({"speculative": {"mode": "ngram"}}, "speculative.mode", "", UNSUPPORTED),
    ({"tools": TOOLS, "response_format": FORMAT}, "tools", "tools is not supported", UNSUPPORTED),
    ({**SCORED, "suffix": "b"}, "echo"),
]
"""For each endpoint and model: wrong fields, the field that the error names, words of its message,
and its code."""
TEXTS: list[tuple[Any, ...]] = [
    ({OBJECT: {"type": "xml"}}, OBJECT, 'must be {"type": "text"}'),
    ({OBJECT: {"type": "json_schema", "schema": {"type": "strin"}}}, OBJECT, "Invalid type: strin"),
    ({OBJECT: {"type": "json_schema", "schema": {"not": {}}}}, OBJECT, "accepts nothing"),
    ({"guided_regex": "a", "regex": "a"}, OBJECT, "at most one of"),
    ({"regex": 5}, "regex", "must be a non-blank string, not 5"),
    ({"regex": "a("}, "regex", "unclosed group"),
    ({"grammar": "root ::= x"}, "grammar", "grammar is wrong: Rule 'x' not found"),
    ({"grammar": "root ::= " + "(" * 9999}, "grammar", "too many brackets"),
    ({"structured_outputs": {}}, "structured_outputs", "one of json, regex, grammar and choice"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs", "is no JSON"),
    ({"structured_outputs": {"json": "[" * 9999}}, "structured_outputs", "more than 64 deep"),
    ({"structured_outputs": {"json": deep(65)}}, "structured_outputs", "more than 64 deep"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos", "cannot be combined"),
    (
        {"structured_outputs": {"tag": "a"}},
        "structured_outputs.tag",
        "not supported",
        UNSUPPORTED,
    ),
    ({"regex": "a" * 65537}, "regex", "more than 65536 bytes"),
]
"""Wrong fields of texts that are bound to something."""
CHATS: list[tuple[Any, ...]] = [
    ({"messages": []}, "messages"),
    ({"messages": [USER] * 16_385}, "messages", "at most 16384 entries"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}, "messages", "is missing"),
    ({"target_lang": "fr"}, "target_lang"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21}, "top_logprobs"),
    (
        {"chat_template_kwargs": {"tokenize": False}},
        "chat_template_kwargs.tokenize",
        "",
        UNSUPPORTED,
    ),
    *(
        ({"messages": [USER, BEGUN], **more}, "continue_final_message")
        for more in (
            {"continue_final_message": True, "add_generation_prompt": True},
            {"continue_final_message": "yes"},
            {"continue_final_message": True, "messages": [CALLED]},
        )
    ),
    ({"tools": [{"type": "custom"}]}, "tools", 'type must be "function"'),
    ({"tools": [function("a b")]}, "tools", "name"),
    ({"tools": [function("a", {"required": [["a"]]})]}, "tools", "required[0] must be a string"),
    ({"function_call": {"name": "keep"}}, "function_call", "give functions"),
    ({"tools": [function(f"f{at}") for at in range(129)]}, "tools", "at most 128"),
    ({"tool_choice": "required"}, "tool_choice", "asks for a call: give tools"),
    (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
        "none of the functions",
    ),
    ({"tools": TOOLS, "tool_choice": NAMED, "regex": "a"}, "tool_choice", "no format or grammar"),
    (
        {"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT},
        "tool_choice",
        "no format",
    ),
    (
        {"tools": [function("a", {"type": "strin"})], "tool_choice": "required"},
        "tools",
        "the parameters of a: json-schema is wrong: Invalid type",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]}
            ],
            "response_format": FORMAT,
        },
        "messages",
        "reads only text",
    ),
    *(
        ({field: {"type": "enabled", name: budget}}, field, f"{field}.{name} must be ")
        for field, name in (("reasoning", "max_tokens"), ("thinking", "budget_tokens"))
        for budget in (-1, 2.5, "many")
    ),
]
CALL = {"type": "function_call", **NAMELESS}
ODD = {"type": "x", "name": "a", "namespace": 5}
ITEMS: list[tuple[Any, ...]] = [
    ({"input": "word " * 2000}, "input", "", TOO_LONG),
    ({"input": 5}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "function_call", "name": "x"}]}, "input"),
    ({"input": [{**CALL, "namespace": 5}]}, "input"),
    ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [ODD]}}, "tool_choice"),
    ({"background": True}, "background", "", UNSUPPORTED),
    ({"conversation": "conv_1"}, "conversation", "", UNSUPPORTED),
    ({"tools": [{"name": "x"}]}, "tools"),
    ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "text"),
    ({"max_output_tokens": "x"}, "max_output_tokens"),
    (
        {"tools": [{**TOOLS[0]["function"], "type": "function"}], "tool_choice": "required"}
        | {"text": FLAT},
        "tool_choice",
        "no format",
    ),
]
BLOCKS: list[tuple[Any, ...]] = [
    ({"thinking": {"type": "x"}}, None),
    ({"tool_choice": {"type": "x"}}, None),
    ({"tools": [5]}, None),
    (
        {"tools": ANTHROPIC, "tool_choice": {"type": "any"}, "output_config": FLAT},
        None,
        "no format",
    ),
    (
        {
            "messages": [{"role": "user", "content": [{"type": "image", "source": SOURCE}]}],
            "output_config": FLAT,
        },
        None,
        "reads only text",
    ),
]
NO_MARKS = "no tokens that mark prefix and suffix"
TWICE = {"messages": [USER, USER]}
CALLING = {"tools": TOOLS}
TABLES: dict[tuple[str, str], list[tuple[Any, ...]]] = {
    ("tiny", COMPLETIONS): COMPLETION + TEXTS,
    ("talks", CHAT): CHATS + TEXTS,
    ("talks", RESPONSES): ITEMS,
    ("talks", MESSAGES): BLOCKS,
    ("tiny", CHAT): [(CALLING, "tools", "need a chat template", UNSUPPORTED)],
    ("no-tools", CHAT): [(CALLING, "tools", "does not support", UNSUPPORTED)],
    ("own-calls", CHAT): [
        (CALLING, "tools", "is unknown", UNSUPPORTED),
        ({**CALLING, "tool_choice": NAMED}, "tools", "--tool-call-parser", UNSUPPORTED),
    ],
    ("tiny", "/infill"): [({"input_suffix": "y"}, "input_suffix", NO_MARKS, UNSUPPORTED)],
    ("templated", COMPLETIONS): [({"suffix": "y"}, "suffix", NO_MARKS, UNSUPPORTED)],
    ("filling", COMPLETIONS): [({"prompt": [5, 6], "suffix": "x"}, "suffix")],
    ("filling", "/infill"): [
        ({"input_extra": [{"filename": "a"}]}, "input_extra", "input_extra[0].text is missing")
    ],
    ("translator", COMPLETIONS): [
        (SCORED, "echo"),
        ({"prompt": [5] * 5000}, "prompt", "", TOO_LONG),
    ],
    ("translator", CHAT): [(TWICE, "messages")],
}
WITHOUT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "x"},
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "x"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    "/infill": {},
}


def cases() -> Iterator[Any]:
    for (model, path), table in TABLES.items():
        for at, (fields, *rest) in enumerate(table):
            name = f"{model}{path}-{at}-{'-'.join(fields)}"
            yield pytest.param(model, path, fields, *rest, *("", None)[len(rest) - 1 :], id=name)


@pytest.mark.parametrize(("model", "path", "fields", "param", "said", "code"), [*cases()])
def test_a_wrong_field_is_named(
    models: Callable[[str], Model],
    model: str,
    path: str,
    fields: dict[str, Any],
    param: str | None,
    said: str,
    code: str | None,
) -> None:
    body = {"max_tokens": 4, **WITHOUT[path], **fields, "stream": fields.get("stream", True)}
    body = {"model": model, **{name: body[name] for name in body if body[name] is not None}}
    # JSON has no number like 1e400, but Python reads it as infinity.
    answer = models(model).server.ask(path, json.dumps(body).encode())
    assert answer.status == 400, answer
    error = answer.json["error"]
    assert error["type"] == "invalid_request_error"
    assert error.get("param") == param and said in error["message"], error
    assert code == error.get("code")
    assert error["message"] and "\n" not in error["message"]


def test_a_schema_may_be_nested_64_deep(models: Callable[[str], Model]) -> None:
    schema = {"type": "array", "prefixItems": [], "items": False, "$defs": {"x": deep(62)}}
    choice = models("tiny").choice(
        COMPLETIONS, prompt="x", structured_outputs={"json": schema}, max_tokens=8
    )
    assert json.loads(choice["text"]) == []


def test_a_body_that_is_compressed_is_refused(models: Callable[[str], Model]) -> None:
    answer = models("talks").server.ask(RESPONSES, b"x", Content_Encoding="zstd")
    assert answer.status == 415
