"""Calls of tools that a request demands, allows or forbids, in the format of each family."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from ..support.tooled import CALLS
from ..support.tools import ANTHROPIC, NAMED, TOOLS, function
from .zoo import CHAT, FORMATS, MESSAGES, PERSON, RESPONSES, USER, Model, bound_to, joined

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

Models = Callable[[str], Model]
BODY: dict[str, Any] = {"messages": [USER], "max_tokens": 200, "temperature": 1.0, "seed": 3}
SINGLE = {"parallel_tool_calls": False}
PLAIN = {"speculative": False}
WORDS = {"type": "string", "minLength": 1, "maxLength": 2}
SURE = {"type": "boolean"}
VARIED = {
    "type": "object",
    "properties": {
        "mood": {"enum": ["calm", "loud"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "words": {"type": "array", "items": WORDS, "maxItems": 2},
        "inner": {"type": "object", "properties": {"sure": SURE}, "additionalProperties": False},
    },
    "required": ["age", "words", "inner"],
    "additionalProperties": False,
}
ODD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "format": "path", "pattern": "^[a-z]{1,4}$"},
        "hosts": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "maxItems": 2,
            "uniqueItems": True,
        },
        "never": {"not": {}},
        "not": {"anyOf": [{"not": {}}, {"const": 7}]},
    },
    "required": ["path", "hosts"],
    "additionalProperties": {"not": {}},
    "propertyNames": {"pattern": "^[a-z]+$"},
}
"""A schema as tools have it, with keywords that assert nothing or cannot be enforced."""


def fits(value: Any, schema: Any) -> bool:
    """Return whether a value fits one of the schemas above."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "object":
        keys = {*schema.get("required", ())} <= value.keys() <= schema["properties"].keys()
        return keys and all(fits(value[key], schema["properties"][key]) for key in value)
    if schema["type"] == "array":
        return isinstance(value, list) and all(fits(item, schema["items"]) for item in value)
    kinds = {"string": str, "integer": int, "boolean": bool}
    return type(value) is kinds[schema["type"]]


def functions(message: Any) -> list[Any]:
    return [call["function"] for call in message["tool_calls"]]


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_can_be_demanded_in_each_format(models: Models, name: str) -> None:
    model = models(name)
    body = {**BODY, "tools": [function("keep", VARIED), TOOLS[1]], "tool_choice": NAMED}
    choice = model.choice(CHAT, **body)
    message = choice["message"]
    [call] = functions(message)
    assert choice["finish_reason"] == "tool_calls" and not message["content"]
    assert call["name"] == "keep" and fits(json.loads(call["arguments"]), VARIED)
    assert functions(joined(model.streamed(CHAT, **body, **PLAIN))) == [call]
    id = r"functions\.keep:\d{1,3}" if name == "kimi_k2" else "call_.*"
    assert re.fullmatch(id, message["tool_calls"][0]["id"])


def test_a_format_may_be_named_for_a_model_that_does_not_show_it(models: Models) -> None:
    body = {**BODY, "tools": TOOLS, "tool_choice": NAMED}
    [call] = functions(models("named-calls").message(**body))
    assert re.fullmatch(PERSON, call["arguments"])


def test_only_calls_of_tools_are_calls(models: Models) -> None:
    model, call = models("marked"), '{"name": "drop", "arguments": {}}'
    text = f"Yes.\n<tool_call>\n{call}\n</tool_call>\n<tool_call>{call}</tool_call>"
    body = {**BODY, "tools": TOOLS, "reasoning_effort": "none", **bound_to(text, CALLS)}
    body |= PLAIN
    choice = model.choice(CHAT, **body)
    message, calls = choice["message"], choice["message"]["tool_calls"]
    assert (message["content"], choice["finish_reason"]) == ("Yes.", "tool_calls")
    assert functions(message) == [{"name": "drop", "arguments": "{}"}] * 2
    assert len({call["id"] for call in calls}) == 2 and calls[0]["type"] == "function"
    chunks = model.streamed(CHAT, **body)
    streamed = joined(chunks)
    assert streamed["content"] == "Yes." and functions(streamed) == functions(message)
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(functions(model.message(**body, **SINGLE))) == 1
    without = bound_to("<tool_call>{}</tool_call>", CALLS)
    assert "tool_calls" not in model.message(**without, reasoning_effort="none")


@pytest.mark.parametrize("more", [{}, PLAIN], ids=["drafted", "plain"])
def test_a_demanded_call_is_the_only_one_unless_the_model_goes_on(
    models: Models, more: dict[str, Any]
) -> None:
    """The model never writes its EOS token here. After a call, it goes on only if it writes the
    beginning of another call by itself."""
    model = models("calls")
    body = {**BODY, "tools": TOOLS, "tool_choice": "required", **more, "seed": 1}
    bias = model.bias(**{"<|end|>": -90})
    choice = model.choice(CHAT, **body, logit_bias=bias)
    assert choice["finish_reason"] == "tool_calls"
    assert len(functions(choice["message"])) == 1 and not choice["message"]["content"]
    bias |= model.bias(**{"<tool_call>": 60})
    body |= {"logit_bias": bias, "max_tokens": 80}
    assert len(functions(model.message(**body))) > 1
    assert len(functions(model.message(**body, **SINGLE))) == 1


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_tools_may_be_allowed(models: Models, path: str) -> None:
    model, plain = models("calls"), path == RESPONSES
    tools = [{"type": "function", "name": "keep"}, {"type": "function", "name": "drop"}]

    def formatted(tool: dict[str, Any]) -> dict[str, Any]:
        return tool if plain else {"type": "function", "function": {"name": tool["name"]}}

    body: dict[str, Any] = {"tools": [formatted(tool) for tool in tools]}
    body |= {"input": "Who?"} if plain else {"messages": [USER], "max_tokens": 60}

    def choice(mode: str, name: str) -> dict[str, Any]:
        allowed = {"mode": mode, "tools": [formatted({"type": "function", "name": name})]}
        return {"type": "allowed_tools", **(allowed if plain else {"allowed_tools": allowed})}

    text = json.dumps(model.ok(path, **body, tool_choice=choice("required", "drop")))
    assert '"drop"' in text and '"arguments": "{}"' in text
    error = model.refused(path, **body, tool_choice=choice("auto", "x"))
    assert error["param"] == "tool_choice"


@pytest.mark.parametrize("asked", ["required", "named", "format"])
def test_a_schema_is_enforced_as_far_as_it_can_be(models: Models, asked: str) -> None:
    model, body = models("talks"), {**BODY, **SINGLE, "seed": 2, "reasoning_effort": "none"}
    if asked == "format":
        arguments = model.message(**body, guided_json=ODD)["content"]
    else:
        tools = [function("keep", ODD)]
        choice = NAMED if asked == "named" else "required"
        [call] = functions(model.message(**body, tools=tools, tool_choice=choice))
        arguments = call["arguments"]
    given = json.loads(arguments)
    assert re.fullmatch("[a-z]{1,4}", given["path"]) and len(given["hosts"]) <= 2
    assert {"path", "hosts"} <= given.keys() <= {"path", "hosts", "not"}
    assert given.get("not", 7) == 7


def test_clients_of_anthropic_demand_calls(models: Models) -> None:
    model = models("calls")
    body = {"max_tokens": 200, "messages": [USER], "tools": ANTHROPIC, "temperature": 1, "seed": 2}
    single = {"disable_parallel_tool_use": True}
    reply = model.ok(MESSAGES, **body, tool_choice={"type": "tool", "name": "keep", **single})
    [block] = reply["content"]
    assert (block["type"], block["name"]) == ("tool_use", "keep")
    assert block["caller"] == {"type": "direct"} and reply["stop_reason"] == "tool_use"
    assert re.fullmatch(PERSON, json.dumps(block["input"]))
    choice = {"type": "any", **single}
    events = model.ask(MESSAGES, **body, tool_choice=choice, stream=True).events
    [start] = [event for event in events if event["type"] == "content_block_start"]
    assert start["content_block"]["type"] == "tool_use" and start["content_block"]["input"] == {}
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert re.fullmatch(PERSON, "".join(delta["partial_json"] for delta in deltas))
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]


def test_clients_of_anthropic_send_results_and_read_thoughts(models: Models) -> None:
    model = models("marked")
    use = {"type": "tool_use", "id": "toolu_1", "name": "keep", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "kept"}
    thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
    messages = [
        USER,
        {"role": "assistant", "content": [thought, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    body = {"max_tokens": 2, "messages": messages, "tools": ANTHROPIC}
    call = {"function": {"name": "keep", "arguments": '{"a": 1}'}}
    same = [
        USER,
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "kept"},
        {"role": "user", "content": "And?"},
    ]
    count = model.ok("/tokenize", messages=same, tools=[function("keep")])["count"]
    assert model.ok(f"{MESSAGES}/count_tokens", **body) == {"input_tokens": count}
    # The text of a random model, which nothing binds, is one long thought.
    thinking = {"max_tokens": 9, "messages": [USER], "thinking": {"type": "enabled"}}
    [block] = model.ok(MESSAGES, **thinking)["content"]
    assert block["type"] == "thinking" and block["thinking"]
    events = model.ask(MESSAGES, **thinking, stream=True).events
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == block["thinking"]


@pytest.mark.parametrize("arguments", ['{"city', "[1]", "Bonn", '{"a":' * 9000])
def test_a_call_that_was_cut_can_be_sent_back(models: Models, arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "keep", "arguments": arguments}}
    messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = models("calls").prompt(messages=messages, tools=TOOLS)
    assert json.dumps({"arguments": arguments}) in prompt


def test_calls_and_results_are_sent_back_to_the_model(models: Models) -> None:
    call: dict[str, Any] = {"id": "call_1", "type": "function"}
    call |= {"function": {"name": "keep", "arguments": '{"a":1}'}}
    messages = [
        USER,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "kept"},
    ]
    prompt = (
        "[tools] keep drop[user] Who?[assistant] <think>Hm.</think>"
        '<tool_call>{"name": "keep", "arguments": {"a": 1}}</tool_call>[tool] kept[assistant]'
    )
    for name, shown in (
        ("talks", f"- - - {prompt}"),
        ("marked", re.sub(r"</?(think|tool_call)>", "", prompt)),
    ):
        model = models(name)
        assert model.prompt(messages=messages, tools=TOOLS) == shown
        count = model.ok("/tokenize", messages=messages, tools=TOOLS)["count"]
        answer = model.ok(CHAT, messages=messages, tools=TOOLS, max_tokens=1)
        assert answer["usage"]["prompt_tokens"] == count
