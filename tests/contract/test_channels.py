"""Models that write messages in channels, as gpt-oss does in OpenAI's Harmony format."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from ..support.tools import NAMED, SCHEMA, TOOLS
from .zoo import (
    AGAIN,
    CHANNEL_ANSWERS,
    CHAT,
    KEEP,
    MESSAGES,
    PERSON,
    RESPONSES,
    USER,
    Model,
    joined,
)

Models = Callable[[str], Model]
TOOL = {"type": "function", "name": "keep", "parameters": SCHEMA}


@pytest.mark.parametrize("case", CHANNEL_ANSWERS)
def test_messages_are_read_in_any_tokens(models: Models, case: str) -> None:
    model, (_, reasoning, content, calls) = models("harmony"), CHANNEL_ANSWERS[case]
    first, second = ([{"role": "user", "content": f"<<{case}{again}>>"}] for again in AGAIN)
    choice = model.choice(CHAT, messages=first, tools=TOOLS)
    streamed = joined(model.streamed(CHAT, messages=second, tools=TOOLS))
    for message in (choice["message"], streamed):
        found = [call["function"] for call in message.get("tool_calls", [])]
        assert [(call["name"], call["arguments"]) for call in found] == calls
        assert (message.get("reasoning_content") or "") == reasoning
        assert (message["content"] or "") == content
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")


def test_other_apis_have_the_same_parts(models: Models) -> None:
    model = models("harmony")
    items = model.ok(RESPONSES, input="<<call>>", tools=[TOOL])["output"]
    assert [item["type"] for item in items] == ["reasoning", "function_call"]
    assert (items[1]["name"], items[1]["arguments"]) == ("keep", KEEP)
    tools = [{"name": "keep", "input_schema": SCHEMA}]
    body = {"messages": [{"role": "user", "content": "<<call>>"}], "tools": tools}
    reply = model.ok(MESSAGES, **body, max_tokens=99)
    assert [block["type"] for block in reply["content"]] == ["thinking", "tool_use"]
    assert reply["content"][1]["input"] == {"name": "ab", "age": 7}


@pytest.mark.parametrize("effort", ["none", "low"])
def test_a_call_or_a_format_can_be_demanded(models: Models, effort: str) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    model = models("channels")
    # The end of a thought is likely, so that it comes soon.
    bias = model.bias(**{"<|end|>": 4})
    body: dict[str, Any] = {"temperature": 1.0, "seed": 4, "reasoning_effort": effort}
    call: dict[str, Any] = {"tools": TOOLS, "tool_choice": NAMED}
    answers: list[tuple[dict[str, Any], str]] = [
        (call, ""),
        ({"guided_json": SCHEMA}, PERSON),
        ({"regex": "ab[ab]"}, "ab[ab]"),
    ]
    for more, pattern in answers:
        message = model.message(**body, **more, logit_bias=bias)
        assert effort == "low" or "reasoning_content" not in message
        if more is call:
            [found] = message["tool_calls"]
            assert re.fullmatch(PERSON, found["function"]["arguments"])
        else:
            assert re.fullmatch(pattern, message["content"])
    # Without a c there is no commentary, and so no call.
    bias |= {str(id): -100 for piece, id in model.vocabulary.items() if piece[0] == "c"}
    message = model.message(**body, tools=TOOLS, guided_json=SCHEMA, logit_bias=bias)
    assert re.fullmatch(PERSON, message["content"])


def test_a_thought_in_a_message_of_analysis_has_a_budget(models: Models) -> None:
    model = models("analysis")
    body = {"messages": [USER], "max_tokens": 9, "logit_bias": model.bias(**{"<|end|>": -30})}
    for budget, count in (({}, 9), ({"reasoning": {"max_tokens": 4}}, 4)):
        answer = model.ok(CHAT, **body, **budget)
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == count
        assert answer["choices"][0]["message"]["reasoning_content"]


def test_a_call_with_a_thought_and_a_preamble_can_be_sent_back(models: Models) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "keep", "arguments": KEEP}}
    turn = {"role": "assistant", "content": "Wait.", "reasoning_content": "Hm."}
    messages = [USER, {**turn, "tool_calls": [call]}, {"role": "tool", "content": "kept"}]
    prompt = models("channels").ok("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert "analysis<|message|>Hm.\nWait.<|end|>" in prompt
    assert f"to=functions.keep<|channel|>commentary json<|message|>{KEEP}<|call|>" in prompt
    assert prompt.endswith("<|end|><|start|>assistant")
