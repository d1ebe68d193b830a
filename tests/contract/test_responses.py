"""/v1/responses: the cases of Open Responses' compliance tests and of llm-comply, and what Codex
sends and reads."""

import json
import re
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from ..support.tools import SCHEMA, function
from .zoo import PERSON, RESPONSES, Model, bound_to

pytest.importorskip("llguidance", reason="the extra grammar is not installed")

Models = Callable[[str], Model]
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
    "instructions": "You edit files.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Who?"}]},
    ],
    "tools": [KEEP, PATCH, FILES, {"type": "web_search"}, {"type": "new", "a": [1]}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
    "service_tier": None,
}
CALM = {"reasoning": {"effort": "none"}}


@pytest.fixture
def talks(models: Models) -> Model:
    return models("talks")


def respond(model: Model, **body: Any) -> Any:
    response = model.ok(RESPONSES, **{"max_output_tokens": 8, **body})
    check_response(response)
    return response


def check_response(response: Any) -> None:
    assert response.keys() >= REQUIRED
    assert response["id"].startswith("resp_") and response["object"] == "response"
    for item in response["output"]:
        assert item["status"] in ("completed", "incomplete") and "_" in item["id"]
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"]
    assert usage["input_tokens_details"].keys() == {"cached_tokens"}
    assert usage["output_tokens_details"].keys() == {"reasoning_tokens"}


def streamed(model: Model, **body: Any) -> list[Any]:
    """Return the events of a stream, which agree with one another and with the response at its
    end."""
    answer = model.ask(RESPONSES, **{"max_output_tokens": 8, **body, "stream": True})
    assert answer.status == 200, answer
    events = answer.events
    names = re.findall("^event: (.*)$", answer.body.decode(), re.MULTILINE)
    assert names == [event["type"] for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["output"] == []
    last = events[-1]["response"]
    check_response(last)
    texts: dict[str, str] = {}
    begun: list[str] = []
    for event in events[2:-1]:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(begun)
            assert event["item"]["status"] == "in_progress"
            begun.append(event["item"]["id"])
        elif kind == "response.output_item.done":
            assert event["item"] == last["output"][event["output_index"]]
        else:
            assert event["item_id"] == begun[-1] and event["output_index"] == len(begun) - 1
        if kind.endswith(".delta"):
            texts[begun[-1]] = texts.get(begun[-1], "") + event["delta"]
    for item in last["output"]:
        assert texts.get(item["id"], "") == text_of(item)
    return events


def text_of(item: Any) -> str:
    parts = item.get("content", [{"text": item.get("arguments", item.get("input"))}])
    return "".join(part["text"] for part in parts)


def kinds(events: list[Any]) -> list[str]:
    """Return the types of events, repeated ones once."""
    types = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(types) if at == 0 or kind != types[at - 1]]


def without_ids(items: list[Any]) -> list[Any]:
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in items]


def counted(model: Model, messages: list[Any], **more: Any) -> int:
    """Return the number of tokens of the prompt of a chat."""
    return int(model.ok("/tokenize", messages=messages, **more)["count"])


MESSAGE = {"role": "user", "content": "Who?"}
SAID = {"role": "assistant", "content": "Nobody."}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
PDF = {"type": "input_file", "filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBE"}
CALL = {"type": "function_call", "name": "keep", "arguments": "{}"}
SILENT: dict[str, Any] = {
    "type": "reasoning",
    "summary": [],
    "content": None,
    "encrypted_content": "gAAAA",
}
REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
INPUTS: dict[str, Any] = {
    "a text": "Who?",
    "basic-response": [{"type": "message", **MESSAGE}],
    "system-prompt": [{"role": "system", "content": "Be calm."}, MESSAGE],
    "multi-turn": [MESSAGE, SAID, MESSAGE],
    "image-input": [{"role": "user", "content": [{"type": "input_text", "text": "Look"}, IMAGE]}],
    "file-input": [{"role": "user", "content": [PDF]}],
    "a null content of reasoning": [MESSAGE, SILENT, REFUSAL, MESSAGE],
    "unknown items": [MESSAGE, {"type": "compaction", "encrypted_content": 5}, MESSAGE],
    "an output of parts": [
        MESSAGE,
        {**CALL, "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": [IMAGE]},
    ],
}


@pytest.mark.parametrize("input", INPUTS.values(), ids=INPUTS)
def test_a_stream_is_what_the_whole_answer_is(talks: Model, input: Any) -> None:
    whole = respond(talks, input=input, seed=3)
    assert whole["status"] in ("completed", "incomplete") and whole["output"]
    *_, last = streamed(talks, input=input, seed=3)
    assert without_ids(last["response"]["output"]) == without_ids(whole["output"])
    assert last["timings"]["predicted_n"] == whole["usage"]["output_tokens"]


def test_a_text_has_its_events_in_order(talks: Model) -> None:
    body = {"input": "Who?", "structured_outputs": {"regex": "Yes, it is\\."}, **CALM}
    events = streamed(talks, **body, max_output_tokens=30)
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
    assert [item["content"] for item in response["output"]] == [[part]]
    assert response["status"] == "completed" and response["completed_at"]
    cut = streamed(talks, **body, max_output_tokens=2)[-1]
    assert cut["type"] == "response.incomplete"
    assert cut["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert cut["response"]["output"][-1]["status"] == "incomplete"


def test_reasoning_and_calls_are_items(talks: Model) -> None:
    call = '{"name": "mcp__files__read", "arguments": {"name": "ab", "age": 7}}'
    text = '*** Begin\n"a" \\ é'
    patch = json.dumps({"name": "patch", "arguments": {"input": text}})
    made = (
        f"<think>\nHm.\n</think>\n\nYes.<tool_call>\n{call}\n</tool_call>\n"
        f"<tool_call>\n{patch}\n</tool_call>"
    )
    bound = {"structured_outputs": bound_to(made)}
    events = streamed(talks, **CODEX, **bound, max_output_tokens=200)
    output = events[-1]["response"]["output"]
    encrypted = output[0].pop("encrypted_content")
    assert without_ids(output) == [
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm."}],
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
    output[0]["encrypted_content"] = encrypted
    assert len({item["call_id"] for item in output[2:]}) == 2
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
    # The items that come back make the prompt that the same chat makes, also if only the encrypted
    # content of the reasoning comes back.
    results = [
        {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "kept"},
        {"type": "custom_tool_call_output", "call_id": output[3]["call_id"], "output": "done"},
    ]
    calls = [
        {"type": "function", "id": item["call_id"], "function": {"name": name, "arguments": text}}
        for item, name, text in (
            (output[2], "mcp__files__read", output[2]["arguments"]),
            (output[3], "patch", json.dumps({"input": text})),
        )
    ]
    turn = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm.", "tool_calls": calls}
    messages = [
        {"role": "system", "content": "You edit files."},
        {"role": "developer", "content": "x"},
        MESSAGE,
        turn,
        {"role": "tool", "content": "kept"},
        {"role": "tool", "content": "done"},
    ]
    tools = [function(name) for name in ("keep", "patch", "mcp__files__read")]
    tokens = counted(talks, messages, tools=tools, reasoning_effort="medium")
    silent = [{**output[0], "content": None}, *output[1:]]
    for items in (output, silent):
        again = {**CODEX, "input": [*CODEX["input"], *items, *results]}
        answer = talks.ok(f"{RESPONSES}/input_tokens", **again)
        assert answer == {"object": "response.input_tokens", "input_tokens": tokens}
    *_, last = streamed(talks, **again, max_output_tokens=1)
    assert last["response"]["usage"]["input_tokens"] == tokens


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "keep"}], ids=str)
def test_a_round_trip_of_a_call(models: Models, choice: Any) -> None:
    model = models("calls")
    asked = {"tools": [KEEP], "max_output_tokens": 200}
    events = streamed(model, input="Keep it.", tool_choice=choice, **asked)
    response = events[-1]["response"]
    [call] = response["output"]
    assert re.fullmatch(PERSON, call["arguments"])
    assert {"function_call_arguments.delta", "function_call_arguments.done"} <= {*kinds(events)}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "kept"}
    id = response["id"]
    again = respond(model, previous_response_id=id, input=[result], tools=[KEEP])
    assert again["previous_response_id"] == id
    items = [MESSAGE | {"content": "Keep it."}, call, result]
    count = model.ok(f"{RESPONSES}/input_tokens", input=items, tools=[KEEP])["input_tokens"]
    assert again["usage"]["input_tokens"] == count


def test_a_format_binds_the_text(talks: Model) -> None:
    form = {"type": "json_schema", "name": "x", "strict": True, "schema": SCHEMA}
    # A text takes the place of the image in the prompt.
    body = {"input": [{"role": "user", "content": [IMAGE]}], "text": {"format": form}, **CALM}
    response = respond(talks, **body, max_output_tokens=100)
    assert re.fullmatch(PERSON, text_of(response["output"][-1]))
    assert response["text"]["format"] == form


def test_a_response_is_stored_fetched_and_deleted(talks: Model) -> None:
    server = talks.server
    first = respond(talks, input="One", instructions="Be calm.")
    id = first["id"]
    stored = server.get(f"{RESPONSES}/{id}").json
    assert {**stored, "timings": first["timings"]} == first
    second = respond(talks, input="Two", previous_response_id=id)
    items = [{"role": "user", "content": "One"}, *first["output"], {**MESSAGE, "content": "Two"}]
    count = talks.ok(f"{RESPONSES}/input_tokens", input=items)["input_tokens"]
    assert second["usage"]["input_tokens"] == count
    url = f"http://127.0.0.1:{server.port}{RESPONSES}/{id}"
    with urllib.request.urlopen(urllib.request.Request(url, method="DELETE")) as deleted:
        assert json.load(deleted) == {"id": id, "object": "response.deleted", "deleted": True}
    third = respond(talks, input="Three", previous_response_id=second["id"])
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]
    unstored = respond(talks, input="One", store=False)["id"]
    for answer in (
        server.get(f"{RESPONSES}/{id}"),
        server.get(f"{RESPONSES}/{unstored}"),
        talks.ask(RESPONSES, input="x", previous_response_id=id),
    ):
        assert answer.status == 404
        assert answer.json["error"]["code"] == "previous_response_not_found"
