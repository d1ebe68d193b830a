"""/v1/messages, as Anthropic's clients read it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve.anthropic import CountRequest
from mlx_specdec.text import messages as chat

from ..support.serving import broken_after

PATH = "/v1/messages"
BODY = {
    "model": "tiny",
    "max_tokens": 12,
    "system": [{"type": "text", "text": "Be calm."}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "def"}]}],
    "temperature": 0.8,
    "seed": 4,
}
PROMPT = "ASSISTANT's RULE: Be calm.\nUSER: def\nASSISTANT:"


@pytest.fixture(scope="module")
def text(pair: Pair, alone: Callable[..., str]) -> str:
    return alone(pair.tokenizer.encode(PROMPT), max_tokens=12, temperature=0.8, seed=4)


def answer_to(client: TestClient, **more: Any) -> dict[str, Any]:
    answer = client.post(PATH, json={**BODY, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    answer = client.post(PATH, json={**BODY, **more, "stream": True})
    assert answer.status_code == 200, answer.text
    made = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        made.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {made[-1]['type']}"
    return made


def test_a_message_is_answered(client: TestClient, pair: Pair, text: str) -> None:
    answer = answer_to(client)
    assert answer.pop("id").startswith("msg_")
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
            "input_tokens": len(pair.tokenizer.encode(PROMPT)),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 12,
            "cache_creation": None,
            "inference_geo": None,
            "output_tokens_details": {"thinking_tokens": 0},
            "server_tool_use": None,
            "service_tier": None,
        },
    }
    assert answer_to(client, system="Be calm.")["content"] == answer["content"]
    counted = client.post(f"{PATH}/count_tokens", json=BODY).json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


def test_a_stream_has_its_events_in_order(client: TestClient, text: str) -> None:
    start, block, *deltas, stop, delta, end = events(client)
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["usage"]["output_tokens"] == 0
    assert block["content_block"] == {"type": "text", "text": "", "citations": None}
    assert "".join(each["delta"]["text"] for each in deltas) == text
    assert {each["type"] for each in deltas} == {"content_block_delta"}
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    usage = {**start["message"]["usage"], "cache_read_input_tokens": 0, "output_tokens": 12}
    assert delta["usage"] == usage
    assert end == {"type": "message_stop"}


def test_a_stop_sequence_is_reported(client: TestClient, text: str) -> None:
    stop = text[3:5]
    for stops in ([stop], ["never seen", stop, "nor this"]):
        answer = answer_to(client, stop_sequences=stops)
        assert answer["content"][0]["text"] == text[: text.index(stop)]
        assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
        delta = events(client, stop_sequences=stops)[-2]["delta"]
        assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_a_last_message_of_the_assistant_is_continued(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "The best"}]}
    messages = [*BODY["messages"], begun]
    ids = pair.tokenizer.encode(f"{PROMPT} The best")
    text = alone(ids, max_tokens=12, temperature=0.8, seed=4)
    answer = answer_to(client, messages=messages)
    assert [each["text"] for each in answer["content"]] == [text]
    assert answer["usage"]["input_tokens"] == len(ids)
    counted = client.post(f"{PATH}/count_tokens", json={**BODY, "messages": messages}).json()
    assert counted == {"input_tokens": len(ids)}
    deltas = [each["delta"] for each in events(client, messages=messages) if "delta" in each]
    assert "".join(each.get("text", "") for each in deltas) == text


BILLING = "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;"


@pytest.mark.parametrize(
    "system",
    [
        [{"type": "text", "text": each} for each in (BILLING, "Be calm.")],
        f"{BILLING}\nBe calm.",
        f"{BILLING}Be calm.",
    ],
    ids=["block", "line", "no line break"],
)
def test_lines_of_billing_are_left_out_of_prompts(
    client: TestClient, system: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    chat.log_once.cache_clear()
    plain = answer_to(client)
    assert not any("billing" in each for each in caplog.messages)
    for _ in range(2):
        answer = answer_to(client, system=system)
        assert answer["content"] == plain["content"] and answer["usage"] == plain["usage"]
    assert len([each for each in caplog.messages if "billing" in each]) == 1


def test_what_only_looks_like_billing_stays(client: TestClient) -> None:
    def count(text: str, field: str) -> int:
        settings = {"messages": [{"role": "user", "content": text}], "system": "x"}
        body = {**settings, **({"system": text} if field == "system" else {})}
        return client.post(f"{PATH}/count_tokens", json=body).json()["input_tokens"]

    for text in (f"Never send {BILLING}", "x-anthropic-billing-header: what is that?"):
        assert count(text, "system") >= count(text, "user") - 1
    assert count(BILLING, "user") > count(BILLING, "system")


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


@pytest.mark.parametrize(
    ("field", "value"), [(field, each) for field, values in WRONG.items() for each in values]
)
def test_errors_are_reported_by_their_type(client: TestClient, field: str, value: Any) -> None:
    for path in (PATH, f"{PATH}/count_tokens") if field in CountRequest.model_fields else (PATH,):
        answer = client.post(path, json={**BODY, field: value})
        assert answer.status_code == 400
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_prompt_that_is_too_long_is_called_so_as_anthropic_does(client: TestClient) -> None:
    for content in ("é" * 4096, "x" * 200_000):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4}
        answer = client.post("/v1/messages", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"].startswith("prompt is too long: ")


def test_tools_of_anthropics_servers_are_left_out(client: TestClient, text: str) -> None:
    """This model takes no tools at all."""
    tools = [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]
    assert [each["text"] for each in answer_to(client, tools=tools)["content"]] == [text]
    own = [{"type": "custom", "name": "f", "input_schema": {"type": "object"}}]
    assert client.post(PATH, json={**BODY, "tools": own}).status_code == 400


@pytest.mark.parametrize("where", ["output_config", "output_format"])
def test_an_answer_may_be_bound_to_a_schema(client: TestClient, where: str) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    bound = {"type": "json_schema", "schema": {"type": "integer", "minimum": 10, "maximum": 99}}
    body = {"effort": "low", "format": bound} if where == "output_config" else bound
    [block] = answer_to(client, **{where: body})["content"]
    assert 10 <= json.loads(block["text"]) <= 99


def test_an_engine_that_fails_ends_a_stream_with_an_error(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with broken_after(3, monkeypatch):
        *_, last = events(client, max_tokens=200)
    assert last["type"] == "error" and last["error"]["type"] == "api_error"
