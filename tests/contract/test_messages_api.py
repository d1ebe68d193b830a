"""Anthropic's Messages API, as its clients read it."""

import json
from typing import Any

import pytest

from .several import Several

PATH = "/v1/messages"
BODY: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 12,
    "system": [{"type": "text", "text": "Be calm."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "def"}]}],
    "temperature": 0.8,
    "seed": 4,
}
PROMPT = "ASSISTANT's RULE: Be calm.\nUSER: def\nASSISTANT:"


@pytest.fixture(scope="module")
def text(several: Several) -> str:
    return several.alone(PROMPT, max_tokens=12, temperature=0.8, seed=4)


def ask(several: Several, **more: Any) -> dict[str, Any]:
    return several.server.ok(PATH, **{**BODY, **more})


def count(several: Several, **more: Any) -> int:
    """Return the number of tokens of a prompt, of which the body has no other fields."""
    body = {name: BODY[name] for name in ("model", "system", "messages")}
    answer = several.server.ok(f"{PATH}/count_tokens", **{**body, **more})
    assert list(answer) == ["input_tokens"]
    return int(answer["input_tokens"])


def events(several: Several, **more: Any) -> list[dict[str, Any]]:
    answer = several.server.ask(PATH, {**BODY, **more, "stream": True})
    assert answer.status == 200, answer.body
    names = [line for line in answer.body.decode().splitlines() if line.startswith("event: ")]
    assert names == [f"event: {event['type']}" for event in answer.events]
    return answer.events


def test_a_message_is_answered_and_streamed(several: Several, text: str) -> None:
    answer = ask(several)
    assert answer.pop("id").startswith("msg_")
    usage = answer["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(several.ids(PROMPT))
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": text, "citations": None}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {
            "input_tokens": usage["input_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage["cache_read_input_tokens"],
            "output_tokens": 12,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "service_tier": None,
        },
    }
    assert ask(several, system="Be calm.")["content"] == answer["content"]
    assert count(several) == len(several.ids(PROMPT))
    start, block, *deltas, stop, delta, end = events(several)
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["usage"]["output_tokens"] == 0
    assert block["content_block"] == {"type": "text", "text": "", "citations": None}
    assert "".join(one["delta"]["text"] for one in deltas) == text
    assert {one["type"] for one in deltas} == {"content_block_delta"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 12 and end == {"type": "message_stop"}


def test_a_stop_sequence_is_reported(several: Several, text: str) -> None:
    stop = text[3:5]
    for stops in ([stop], ["never seen", stop, "nor this"]):
        answer = ask(several, stop_sequences=stops)
        assert answer["content"][0]["text"] == text[: text.index(stop)]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
        delta = events(several, stop_sequences=stops)[-2]["delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_a_last_message_of_the_assistant_is_continued(several: Several) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "The best"}]}
    messages = [*BODY["messages"], begun]
    ids = several.ids(f"{PROMPT} The best")
    text = several.alone(ids, max_tokens=12, temperature=0.8, seed=4)
    [block] = ask(several, messages=messages)["content"]
    assert block["text"] == text
    assert count(several, messages=messages) == len(ids)
    deltas = [one["delta"] for one in events(several, messages=messages) if "delta" in one]
    assert "".join(delta.get("text", "") for delta in deltas) == text


WRONG = {
    "max_tokens": (None, -2, 2.5),
    "messages": (None, []),
    "system": (5,),
    "stop_sequences": (5, "a"),
    "temperature": ("hot",),
    "tools": ([{"name": "f"}], [{"type": ""}], [{"type": "search_2025"}]),
    "thinking": ({"type": "much", "budget_tokens": 9}, {"budget_tokens": 9}),
    "output_config": ({"format": {"type": "x"}}, 5),
}
COUNTED = ("messages", "system", "tools", "thinking")
"""Fields that a request to count tokens has as well."""


def test_errors_are_reported_by_their_type(several: Several) -> None:
    for field, values in WRONG.items():
        for value in values:
            for path in (PATH, f"{PATH}/count_tokens")[: 1 + (field in COUNTED)]:
                answer = several.server.ask(path, {**BODY, field: value})
                error = answer.json
                found = answer.status, error["type"], error["error"]["type"]
                assert found == (400, "error", "invalid_request_error"), (path, field, value)


def test_tools_of_anthropics_servers_are_left_out(several: Several, text: str) -> None:
    """This model takes no tools at all."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    assert [block["text"] for block in ask(several, tools=tools)["content"]] == [text]
    own = [{"type": "custom", "name": "f", "input_schema": {"type": "object"}}]
    assert several.server.ask(PATH, {**BODY, "tools": own}).status == 400


def test_an_answer_may_be_bound_to_a_schema(several: Several) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    bound = {"type": "json_schema", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}
    [block] = ask(several, output_config={"effort": "low", "format": bound})["content"]
    assert 10 <= json.loads(block["text"]) <= 99
