"""/v1/responses: the cases of Open Responses' compliance tests and of llm-comply, and what Codex
sends and reads."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

from starlette.testclient import TestClient

from mlx_specdec.serve import service
from mlx_specdec.serve.app import Access
from mlx_specdec.serve.items import ENCRYPTED, as_chat
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.responses import custom_input
from mlx_specdec.serve.settings import Limits
from mlx_specdec.serve.stored import Conversation, StoredResponses
from mlx_specdec.text import messages

from ..support.serving import CHAT, SCHEMA, broken_after, client_of, ok, running
from ..support.tooled import CALLS, make_tooled
from .test_tools import bound_to

PATH = "/v1/responses"
REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model"),
    *("previous_response_id", "instructions", "output", "error", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty", "usage"),
    *("frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "store"),
    *("max_output_tokens", "max_tool_calls", "background", "service_tier", "metadata"),
    *("safety_identifier", "prompt_cache_key"),
}
"""Fields of a response, which may be null (openresponses, ResponseResource.json)."""
KEEP = {"type": "function", "name": "keep", "parameters": SCHEMA, "strict": True}
PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES = {"type": "namespace", "name": "mcp__files__", "tools": [{**KEEP, "name": "read"}]}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You edit files.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
    ],
    "tools": [KEEP, PATCH, FILES, {"type": "web_search"}, {"type": "new", "a": [1]}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
    "service_tier": None,
    "max_output_tokens": 8,
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    directory = make_tooled(tmp_path_factory.mktemp("tooled"))
    with running((directory, None)) as engine:
        yield client_of(engine, Limits(context=1024))


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A model that calls without reasoning, which has no end in random texts."""
    directory = make_tooled(tmp_path_factory.mktemp("calling"), marks=CALLS)
    with running((directory, None)) as engine:
        yield client_of(engine)


def respond(client: TestClient, **body: Any) -> dict[str, Any]:
    response = ok(client, PATH, **{"max_output_tokens": 12, **body})
    check_response(response)
    return response


def check_response(response: dict[str, Any]) -> None:
    assert response.keys() >= REQUIRED
    assert response["id"].startswith("resp_") and response["object"] == "response"
    for item in response["output"]:
        assert item["status"] in ("completed", "incomplete") and "_" in item["id"]
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens"}
    assert usage["output_tokens_details"].keys() == {"reasoning_tokens"}


def streamed(client: TestClient, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which agree with one another and with the response at its end."""
    answer = client.post(PATH, json={"max_output_tokens": 12, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = []
    for block in answer.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    assert [each["type"] for each in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    check_response(last)
    texts: dict[str, str] = {}
    begun: list[str] = []
    for each in events[2:-1]:
        kind = each["type"]
        if kind == "response.output_item.added":
            assert each["output_index"] == len(begun) and each["item"]["status"] == "in_progress"
            begun.append(each["item"]["id"])
        elif kind == "response.output_item.done":
            assert each["item"] == last["output"][each["output_index"]]
        else:
            assert each["item_id"] == begun[-1] and each["output_index"] == len(begun) - 1
        if kind.endswith(".delta"):
            texts[begun[-1]] = texts.get(begun[-1], "") + each["delta"]
    for item in last["output"]:
        assert texts.get(item["id"], "") == text_of(item)
    return events


def text_of(item: dict[str, Any]) -> str:
    parts = item.get("content", [{"text": item.get("arguments", item.get("input"))}])
    return "".join(each["text"] for each in parts)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, repeated ones once."""
    types = [each["type"].removeprefix("response.") for each in events]
    return [kind for at, kind in enumerate(types) if at == 0 or kind != types[at - 1]]


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in items]


MESSAGE = {"role": "user", "content": "Who?"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
PDF = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}
CASES: dict[str, Any] = {
    "a text": "Who?",
    "basic-response": [{"type": "message", **MESSAGE}],
    "system-prompt": [{"role": "system", "content": "Be calm."}, MESSAGE],
    "multi-turn": [MESSAGE, {"role": "assistant", "content": "Nobody."}, MESSAGE],
    "image-input": [{"role": "user", "content": [{"type": "input_text", "text": "Look"}, IMAGE]}],
    "file-input": [{"role": "user", "content": [PDF]}],
    "a null content of reasoning": [
        MESSAGE,
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        MESSAGE,
    ],
    "unknown items": [MESSAGE, {"type": "compaction", "encrypted_content": 5}, MESSAGE],
    "an output of parts": [
        MESSAGE,
        {"type": "function_call", "call_id": "1", "name": "keep", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [IMAGE]},
    ],
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_a_stream_is_what_the_whole_answer_is(client: TestClient, given: Any) -> None:
    whole = respond(client, input=given, seed=3)
    assert whole["status"] in ("completed", "incomplete") and whole["output"]
    *_, last = streamed(client, input=given, seed=3)
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    assert last["timings"]["predicted_n"] == whole["usage"]["output_tokens"]


def test_what_is_unknown_is_skipped_with_one_line(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    messages.log_once.cache_clear()
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [{"type": "y"}]}]
    for _ in range(2):
        respond(client, input=CASES["unknown items"], tools=tools)
    told = [each.split(",")[0] for each in caplog.messages if each.startswith("skipped")]
    kinds = {"a tool": ("web_search", "y"), "an input item": ("compaction",)}
    assert {*told} == {f"skipped {of} of the type {it!r}" for of in kinds for it in kinds[of]}
    assert len(told) == 3


CALM = {"reasoning": {"effort": "none"}}


def test_a_text_has_its_events_in_order(client: TestClient) -> None:
    body = {"input": "Who?", "structured_outputs": {"regex": "Yes, it is\\."}, **CALM}
    events = streamed(client, **body)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    part = {"type": "output_text", "text": "Yes, it is.", "annotations": [], "logprobs": []}
    response = events[-1]["response"]
    assert [each["content"] for each in response["output"]] == [[part]]
    assert response["status"] == "completed" and response["completed_at"]
    cut = streamed(client, **body, max_output_tokens=2)[-1]
    assert cut["type"] == "response.incomplete"
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["response"]["output"][-1]["status"] == "incomplete"


def test_reasoning_and_calls_are_items(client: TestClient) -> None:
    call = '{"name": "mcp__files__read", "arguments": {"name": "ab", "age": 7}}'
    text = '*** Begin\n"a" \\ é'
    patch = json.dumps({"name": "patch", "arguments": {"input": text}})
    made = (
        f"<think>\nHm.\n</think>\n\nYes.<tool_call>\n{call}\n</tool_call>\n"
        f"<tool_call>\n{patch}\n</tool_call>"
    )
    body = {**CODEX, "max_output_tokens": 200, "parallel_tool_calls": True}
    body["structured_outputs"] = bound_to(made, False)
    events = streamed(client, **body)
    output = events[-1]["response"]["output"]
    assert without_ids(output) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
            "encrypted_content": f"{ENCRYPTED}Hm.",
        },
        {
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes.", "annotations": [], "logprobs": []}],
        },
        {
            "type": "function_call",
            "status": "completed",
            "name": "read",
            "namespace": "mcp__files__",
            "arguments": '{"name": "ab", "age": 7}',
        },
        {"type": "custom_tool_call", "status": "completed", "name": "patch", "input": text},
    ]
    assert len({each["call_id"] for each in output[2:]}) == 2
    assert kinds(events)[2:6] == [
        "output_item.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "output_item.done",
    ]
    assert kinds(events)[-9:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]
    assert events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    # What comes back makes the prompt that the chat of it makes.
    results = [
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "kept"},
        {"type": "custom_tool_call_output", "call_id": output[3]["call_id"], "output": "done"},
    ]
    again = {**CODEX, "input": [*CODEX["input"], *output, *results]}
    chat = as_chat(again, again["input"])
    assert [each["role"] for each in chat["messages"]] == [
        "system",
        "developer",
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    turn = chat["messages"][3]
    assert (turn["content"], turn["reasoning_content"]) == ("Yes.", "Hm.")
    assert [each["function"]["name"] for each in turn["tool_calls"]] == [
        "mcp__files__read",
        "patch",
    ]
    assert turn["tool_calls"][1]["function"]["arguments"] == {"input": text}
    counted = ok(client, f"{PATH}/input_tokens", **again)
    assert counted["object"] == "response.input_tokens"
    tokens = ok(client, "/tokenize", messages=chat["messages"], tools=chat["tools"])["count"]
    assert counted["input_tokens"] == tokens
    assert streamed(client, **again)[-1]["response"]["usage"]["input_tokens"] == tokens


def test_what_the_assistant_does_is_one_turn() -> None:
    call = {"type": "function_call", "name": "keep", "arguments": "{}"}
    said = {"role": "assistant", "content": "I look."}
    items = [
        MESSAGE,
        {**call, "call_id": "1"},
        said,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "function_call_output", "call_id": "2", "output": "b"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        said,
    ]
    _, first, one, two, second = as_chat({}, items)["messages"]
    assert [each["id"] for each in first["tool_calls"]] == ["1", "2"]
    assert first["content"] == second["content"] == "I look."
    assert [one["tool_call_id"], two["tool_call_id"]] == ["1", "2"]
    assert second["reasoning_content"] == "Hm."


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\n\\u00e9\\"b"}', 'a\né"b'),
        ('{"other": 1}', '{"other": 1}'),
        ('{"input": "a", "other": 1}', '{"input": "a", "other": 1}'),
    ],
)
def test_the_input_of_a_custom_tool_is_no_json(arguments: str, text: str) -> None:
    assert custom_input(arguments) == text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "keep"}])
def test_a_round_trip_of_a_call(calling: TestClient, choice: Any) -> None:
    asked = {"tools": [KEEP], "max_output_tokens": 200}
    events = streamed(calling, input="Keep it.", tool_choice=choice, **asked)
    response = events[-1]["response"]
    [call] = response["output"]
    assert json.loads(call["arguments"]).keys() == {"name", "age"}
    assert {"function_call_arguments.delta", "function_call_arguments.done"} <= {*kinds(events)}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "kept"}
    id = response["id"]
    again = respond(calling, previous_response_id=id, input=[result], tools=[KEEP])
    assert again["previous_response_id"] == id
    given = [MESSAGE | {"content": "Keep it."}, call, result]
    assert (
        again["usage"]["input_tokens"]
        == respond(calling, input=given, tools=[KEEP])["usage"]["input_tokens"]
    )


@pytest.mark.parametrize("path", ["chat", "responses"])
def test_tools_may_be_allowed(calling: TestClient, path: str) -> None:
    tools = [KEEP, {"type": "function", "name": "drop"}]
    if path == "chat":
        body: dict[str, Any] = {
            "messages": [MESSAGE],
            "max_tokens": 200,
            "tools": [{"type": "function", "function": each} for each in tools],
        }
        named: Any = {"type": "function", "function": {"name": "drop"}}
        others: Any = {"type": "function", "function": {"name": "x"}}
    else:
        body = {"input": "Who?", "tools": tools}
        named, others = {"type": "function", "name": "drop"}, {"type": "function", "name": "x"}

    def post(mode: str, allowed: Any) -> Any:
        given: dict[str, Any] = {"mode": mode, "tools": [allowed]}
        inner = {"allowed_tools": given} if path == "chat" else given
        choice = {"type": "allowed_tools", **inner}
        where = CHAT if path == "chat" else PATH
        return calling.post(where, json={**body, "tool_choice": choice})

    answer = post("required", named)
    assert (
        answer.status_code == 200 and '"drop"' in answer.text and '"arguments":"{}"' in answer.text
    )
    refusal = post("auto", others)
    assert refusal.status_code == 400 and refusal.json()["error"]["param"] == "tool_choice"


def test_a_format_binds_the_text(client: TestClient) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    body = {"input": "Who?", "text": {"format": form}, "max_output_tokens": 100, **CALM}
    response = respond(client, **body)
    assert json.loads(text_of(response["output"][-1])).keys() == {"name", "age"}
    assert response["text"]["format"] == form


def test_a_response_is_stored_fetched_and_deleted(client: TestClient) -> None:
    first = respond(client, input="One", instructions="Be calm.")
    id = first["id"]
    stored = client.get(f"{PATH}/{id}").json()
    assert {**stored, "timings": first["timings"]} == first
    second = respond(client, input="Two", previous_response_id=id)
    given = [{"role": "user", "content": "One"}, *first["output"], {**MESSAGE, "content": "Two"}]
    whole = respond(client, input=given)
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    deleted = client.delete(f"{PATH}/{id}")
    assert deleted.json() == {"id": id, "object": "response.deleted", "deleted": True}
    third = respond(client, input="Three", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    unstored = respond(client, input="One", store=False)["id"]
    for answer in (
        client.get(f"{PATH}/{id}"),
        client.delete(f"{PATH}/{id}"),
        client.get(f"{PATH}/{unstored}"),
        client.post(PATH, json={"input": "x", "previous_response_id": id}),
    ):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_of_another_key_is_not_found(llama: tuple[Path, Path]) -> None:
    with running(llama) as engine:
        client = client_of(engine, access=Access(["one", "two"]))
        one, two = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"input": "One", "max_output_tokens": 2}
        id = client.post(PATH, json=body, headers=one).json()["id"]
        body["previous_response_id"] = id
        for key, status in ((two, 404), (one, 200)):
            found = client.get(f"{PATH}/{id}", headers=key)
            continued = client.post(PATH, json=body, headers=key)
            deleted = client.delete(f"{PATH}/{id}", headers=key)
            assert {each.status_code for each in (found, continued, deleted)} == {status}


def test_stored_responses_stay_within_their_bound() -> None:
    stored = StoredResponses(most_bytes=4000)
    given = [{"role": "user", "content": "x" * 1000}]
    for number in range(10):
        stored.put({"id": str(number), "output": []}, Conversation(), given, "a")
        assert stored.nbytes <= 4000
    before = stored.get("9", "a")
    for number in range(7):
        with pytest.raises(Problem):
            stored.get(str(number), "a")
    with pytest.raises(Problem):
        stored.get("9", "b")  # of another tenant
    # All that a long conversation has counts.
    stored.put({"id": "next", "output": []}, before, given, "a")
    assert [*stored.get("next", "a").items] == given * 2 and stored.nbytes <= 4000
    stored.put({"id": "too large", "output": []}, Conversation(), [{"content": "x" * 5000}], "a")
    assert stored.nbytes == 0


def test_silence_and_failures_are_events(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 1e-5)
    body = {**CODEX, "input": [{"role": "user", "content": "Who? " * 60}]}
    text = client.post(PATH, json=body).text
    assert text.count("event: response.in_progress\n") > 1 and "keep-alive" not in text
    ping = {"messages": body["input"], "max_tokens": 8, "stream": True}
    assert 'event: ping\ndata: {"type": "ping"}' in client.post("/v1/messages", json=ping).text
    monkeypatch.undo()
    with broken_after(3, monkeypatch):
        *_, block, end = client.post(PATH, json=CODEX).text.split("\n\n")
    name, data = block.split("\n")
    response = json.loads(data.removeprefix("data: "))["response"]
    assert (end, name) == ("", "event: response.failed")
    assert response["status"] == "failed" and "/a/path" not in json.dumps(response)
    assert response["error"]["code"] == "server_error" and response["error"]["message"]


NAMED_CALL = {"name": "x", "arguments": "{}", "call_id": "1"}
ODD = {"type": "x", "name": "a", "namespace": 5}


def test_a_client_learns_what_is_wrong_in_the_words_of_this_api(client: TestClient) -> None:
    long = client.post(PATH, json={"input": "word " * 2000}).json()["error"]
    assert (long["code"], long["param"]) == ("context_length_exceeded", "input")
    for name, value in (
        ("input", 5),
        ("input", []),
        ("input", [{"type": "function_call", "name": "x"}]),
        ("input", [{"type": "function_call", **NAMED_CALL, "namespace": 5}]),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": [ODD]}),
        ("background", True),
        ("conversation", "conv_1"),
        ("tools", [{"name": "x"}]),
        ("tool_choice", {"type": "function", "name": "x"}),
        ("text", {"format": {"type": "json_schema", "schema": {"type": "x"}}}),
        ("max_output_tokens", "x"),
    ):
        answer = client.post(PATH, json={"input": "x", name: value})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name, name
    packed = client.post(PATH, content=b"x", headers={"Content-Encoding": "zstd"})
    assert packed.status_code == 415
