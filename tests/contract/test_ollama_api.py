"""ollama's API: completions, embeddings, models that come and go, and refusals in a sentence."""

import json
import math
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from .several import CALL, PROMPT, SCHEMA, Several
from .support import wait_until

GENERATE, CHAT = "/api/generate", "/api/chat"
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
Ask = Callable[..., Any]


@pytest.fixture
def ok(several: Several) -> Ask:
    """A function that asks and returns the complete answer."""
    return several.server.ok


@pytest.fixture
def lines(several: Several) -> Ask:
    """A function that asks and returns the lines of a stream, which is the default."""

    def ask(path: str, **body: Any) -> list[dict[str, Any]]:
        answer = several.server.ask(path, body)
        assert answer.status == 200, answer.body
        assert answer.headers["content-type"].startswith("application/x-ndjson")
        return answer.events

    return ask


def test_a_text_is_generated_whole_and_in_lines(several: Several, ok: Ask, lines: Ask) -> None:
    ids, text = several.ids(PROMPT), several.alone(PROMPT, max_tokens=12)
    body = {"model": "tiny:latest", "prompt": PROMPT, "options": {"num_predict": 12}}
    answer = ok(GENERATE, stream=False, **body)
    assert (answer["model"], answer["response"], answer["done"]) == ("tiny", text, True)
    assert answer["done_reason"] == "length"
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(ids), 12)
    assert all(isinstance(answer[name], int) for name in DURATIONS)
    assert answer["total_duration"] >= answer["eval_duration"] > 0
    datetime.fromisoformat(answer["created_at"])
    *pieces, last = lines(GENERATE, **body)
    assert "".join(piece["response"] for piece in pieces) == text
    assert not any(piece["done"] for piece in pieces)
    assert (last["response"], last["done"], last["eval_count"]) == ("", True, 12)


SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 4}
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5}


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3}),
        ({**SAMPLED, "temperature": 1, "num_ctx": 64}, SAMPLED),
        ({"repeat_penalty": 1.5, **PENALTIES}, {"repetition_penalty": 1.5, **PENALTIES}),
    ],
    ids=["temperature", "filters", "penalties"],
)
def test_options_are_kept(
    several: Several, ok: Ask, options: dict[str, Any], means: dict[str, Any]
) -> None:
    body = {"prompt": PROMPT, "raw": True, "stream": False}
    answer = ok(GENERATE, **body, model="tiny", options={**options, "num_predict": 10})
    assert answer["response"] == several.alone(PROMPT, max_tokens=10, **means)


@pytest.mark.parametrize("think", [None, True, False])
def test_a_chat_is_that_of_openais_api(ok: Ask, lines: Ask, think: bool | None) -> None:
    messages = [{"role": "system", "content": "Be calm."}, {"role": "user", "content": "Who?"}]
    fields = {} if think is None else {"enable_thinking": think}
    [choice] = ok("/v1/chat/completions", model="chat", messages=messages, **fields)["choices"]
    body = {"model": "chat", "messages": messages, "think": think}
    answer = ok(CHAT, stream=False, **body)["message"]
    assert answer["role"] == "assistant" and answer["content"]
    assert answer["content"] == choice["message"]["content"]
    thought = choice["message"].get("reasoning_content")
    assert answer.get("thinking") == thought and bool(thought) == (think is True)
    pieces = [line["message"] for line in lines(CHAT, **body)]
    assert "".join(piece["content"] for piece in pieces) == answer["content"]
    assert "".join(piece.get("thinking", "") for piece in pieces) == (thought or "")
    body = {"model": "chat", "prompt": "Who?", "system": "Be calm.", "think": think}
    generated = ok(GENERATE, stream=False, **body)
    assert generated["response"] == answer["content"]
    assert generated.get("thinking") == thought


def test_calls_of_tools_are_whole_and_come_back(ok: Ask, lines: Ask) -> None:
    function = {"name": "keep", "parameters": SCHEMA}
    body = {
        "model": "chat",
        "messages": [{"role": "user", "content": "Keep it."}],
        "tools": [{"type": "function", "function": function}],
    }
    message = ok(CHAT, stream=False, **body)["message"]
    assert [call["function"] for call in message["tool_calls"]] == [{"index": 0, **CALL}]
    pieces = [line["message"] for line in lines(CHAT, **body)]
    streamed = [call for piece in pieces for call in piece.get("tool_calls", ())]
    assert [call["function"] for call in streamed] == [{"index": 0, **CALL}]
    result = {"role": "tool", "tool_name": "keep", "content": "kept"}

    def prompt_tokens(message: Any) -> int:
        messages = [*body["messages"], message, result]
        asked = {"messages": messages, "options": {"num_predict": 1}, "stream": False}
        return int(ok(CHAT, model="chat", **asked)["prompt_eval_count"])

    assert prompt_tokens(message) > prompt_tokens({"role": "assistant", "content": ""})


def test_texts_are_embedded_as_by_openais_api(several: Several, ok: Ask) -> None:
    texts = [PROMPT, "é"]
    expected = ok("/v1/embeddings", model="tiny", input=texts)
    vectors = [entry["embedding"] for entry in expected["data"]]
    answer = ok("/api/embed", model="tiny:latest", input=texts)
    assert (answer["model"], answer["embeddings"]) == ("tiny", vectors)
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["total_duration"] > answer["load_duration"] >= 0
    assert ok("/api/embed", model="tiny", input=PROMPT)["embeddings"] == vectors[:1]
    # Without a text, the model is only loaded.
    assert ok("/api/embed", model="tiny", input="")["embeddings"] == []


@pytest.mark.parametrize("kind", ["json", SCHEMA], ids=["json", "schema"])
def test_a_format_binds_the_text(ok: Ask, kind: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    options = {"num_predict": 200, "temperature": 1.0, "seed": 2, "stop": ["}"]}
    body = {"model": "tiny", "prompt": PROMPT, "format": kind, "options": options}
    text = ok(GENERATE, stream=False, **body)["response"]
    assert text.lstrip().startswith("{")
    if kind != "json":
        assert set(json.loads(text + "}")) == {"name", "age"}


KEEPS = "keep_alive must be seconds"
IMAGE = {"role": "user", "content": "x", "images": ["aGk="]}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"messages": [IMAGE]}, "reads only text"),
    ("generate", {"images": ["aGk="]}, "images is not supported"),
    ("generate", {"template": "{{ .Prompt }}"}, "template is not supported"),
    ("generate", {"context": [1]}, "context is not supported"),
    ("generate", {"options": {"mirostat": 1}}, "mirostat is not"),
    ("generate", {"options": {"top_p": 7}}, "options.top_p: "),
    ("generate", {"options": {"num_predict": -3}}, "options.num_predict: "),
    ("generate", {"format": "xml"}, "format: "),
    ("generate", {"think": "much"}, "think: "),
    *(("generate", {"keep_alive": text}, KEEPS) for text in ("soon", "", "m", "5 minutes", "nan")),
    *(("embed", {"input": "x", "keep_alive": text}, KEEPS) for text in ("1d", "soon")),
    ("embed", {"input": [5]}, "input[0]: "),
    ("embed", {"input": "x", "dimensions": 3}, "dimensions must be"),
]


def test_what_is_not_supported_is_named(several: Several) -> None:
    for path, body, said in WRONG:
        answer = several.server.ask(f"/api/{path}", {"model": "tiny", "prompt": "x", **body})
        assert answer.status == 400 and list(answer.json) == ["error"], (path, body)
        assert said in answer.json["error"], (path, body)


CHANGING = ("pull", "push", "create", "copy", "delete")


def test_what_changes_models_is_refused_in_a_sentence(several: Several) -> None:
    for path in CHANGING:
        method = "DELETE" if path == "delete" else "POST"
        answer = several.server.ask(f"/api/{path}", {"model": "llama3"}, method=method)
        assert (answer.status, list(answer.json)) == (400, ["error"])
        words = "is not supported, because this server does not change its models: ask for "
        assert answer.json["error"].startswith(f"/api/{path} {words}"), answer
        assert "start it with another --model NAME" in answer.json["error"]


SECONDS: dict[float | str, float] = {
    "300": 300,
    300: 300,
    "5m": 300,
    "1.5h": 5400,
    "90000ms": 90,
    "-1m": math.inf,
    -1: math.inf,
}
"""Durations as Go writes them, and their seconds."""


def test_models_are_loaded_kept_and_unloaded_as_a_client_says(several: Several, ok: Ask) -> None:
    def in_memory() -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in several.server.get("/api/ps").json["models"]}

    listed = several.server.get("/api/tags").json["models"]
    assert all(one["name"] == one["model"] and one["size"] > 0 for one in listed)
    assert len({one["digest"] for one in listed}) == len(listed) >= 8
    assert "random" not in in_memory()
    unknown = several.server.ask("/api/show", {"model": "nobody"})
    assert unknown.status == 404 and "not served here" in unknown.json["error"]
    assert ok("/api/show", model="random")["capabilities"] == ["completion"]
    assert "random" not in in_memory()
    # Nothing is loaded to be unloaded.
    assert ok(CHAT, model="random", keep_alive=0)["done_reason"] == "unload"
    assert "random" not in in_memory()
    loaded = ok(CHAT, model="random", messages=[], keep_alive="5m")
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert loaded["message"] == {"role": "assistant", "content": ""}
    # A request of another API leaves the time as it is.
    ok("/v1/completions", model="random", prompt="x", max_tokens=1, keep_alive=-1)
    for keep_alive, seconds in SECONDS.items():
        if keep_alive != "300":
            ok(GENERATE, model="random", keep_alive=keep_alive)
        expires = in_memory()["random"]["expires_at"]
        if seconds == math.inf:
            assert expires.startswith("9999")
        else:
            left = datetime.fromisoformat(expires) - datetime.now().astimezone()
            assert timedelta(seconds=seconds - 60) < left <= timedelta(seconds=seconds)
    about = ok("/api/show", model="random")
    family = about["model_info"]["general.architecture"]
    assert family == about["details"]["family"] == "llama"
    context = in_memory()["random"]["context_length"]
    assert about["model_info"][f"{family}.context_length"] == context
    ended = ok(GENERATE, model="random", keep_alive=0)
    assert (ended["response"], ended["done_reason"]) == ("", "unload")
    assert "random" not in in_memory()
    body = {"prompt": "x", "options": {"num_predict": 1}, "stream": False}
    for keep_alive in ("0", "1ms"):
        ok(GENERATE, model="random", keep_alive=-1)
        ok(GENERATE, model="random", **body, keep_alive=keep_alive)
        wait_until(lambda: "random" not in in_memory())
    assert several.server.get("/api/version").json["version"].count(".") == 2
