"""ollama's API, with the answers that its clients read."""

import json
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve import ollama
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.ollama_bodies import seconds_of
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.registry import Registry, ServedModel
from mlx_specdec.serve.service import Service
from mlx_specdec.serve.settings import Limits

from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    SCHEMA,
    TEXT,
    broken_after,
    client_for,
    client_of,
    ok,
    running,
    user,
    wait_until,
)
from ..support.tooled import TOOLS, make_tooled

DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running((make_tooled(tmp_path_factory.mktemp("tooled")), None)) as engine:
        yield engine


def lines(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which is the default."""
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_text_is_generated_whole_and_in_lines(
    client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    ids = pair.tokenizer.encode(TEXT)
    text = alone(ids, max_tokens=12)
    body = {"model": "tiny:latest", "prompt": TEXT, "options": {"num_predict": 12}}
    answer = ok(client, "/api/generate", stream=False, **body)
    assert (answer["model"], answer["response"], answer["done"]) == ("tiny", text, True)
    assert answer["done_reason"] == "length"
    assert (answer["prompt_eval_count"], answer["eval_count"]) == (len(ids), 12)
    assert all(isinstance(answer[name], int) for name in DURATIONS)
    assert answer["total_duration"] >= answer["eval_duration"] > 0
    datetime.fromisoformat(answer["created_at"])
    *pieces, last = lines(client, "/api/generate", **body)
    assert "".join(piece["response"] for piece in pieces) == text
    assert not any(piece["done"] for piece in pieces)
    assert (last["response"], last["done"], last["eval_count"]) == ("", True, 12)


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({"temperature": 0.8, "seed": 3}, {"temperature": 0.8, "seed": 3}),
        (
            {"temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 4, "num_ctx": 64},
            {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "seed": 4},
        ),
        (
            {"repeat_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
            {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.5},
        ),
    ],
    ids=str,
)
def test_options_are_kept(
    client: TestClient,
    pair: Pair,
    alone: Callable[..., str],
    options: dict[str, Any],
    means: dict[str, Any],
) -> None:
    text = alone(pair.tokenizer.encode(TEXT), max_tokens=10, **means)
    options = {**options, "num_predict": 10}
    body = {"prompt": TEXT, "raw": True, "stream": False, "options": options}
    assert ok(client, "/api/generate", **body)["response"] == text


def test_a_stop_string_ends_a_text_and_no_limit_is_the_default(
    engine: Engine, client: TestClient, pair: Pair, alone: Callable[..., str]
) -> None:
    text = alone(pair.tokenizer.encode(TEXT), max_tokens=12)
    stop = {"stop": [text[5:7]], "num_predict": -2}
    answer = ok(client, "/api/generate", prompt=TEXT, stream=False, options=stop)
    assert answer["response"] == text[: text.index(text[5:7])]
    assert answer["done_reason"] == "stop"
    short = client_of(engine, Limits(context=50))
    endless = ok(short, "/api/generate", prompt=TEXT, stream=False)
    assert endless["prompt_eval_count"] + endless["eval_count"] == 50
    assert endless["eval_count"] > OPTIONS.max_tokens


def test_a_chat_is_that_of_openais_api(tooled: Engine) -> None:
    client = client_of(tooled)
    messages = [{"role": "system", "content": "Be calm."}, user("Who?")]
    same = {"messages": messages, "seed": 1, "temperature": 1.0, "max_tokens": 16}
    for think in (None, True, False):
        fields = {} if think is None else {"enable_thinking": think}
        [choice] = ok(client, CHAT, **same, **fields)["choices"]
        options = {"seed": 1, "temperature": 1.0, "num_predict": 16}
        body = {"messages": messages, "options": options, "think": think}
        answer = ok(client, "/api/chat", stream=False, **body)["message"]
        assert answer["role"] == "assistant"
        assert answer["content"] == choice["message"]["content"]
        thought = choice["message"].get("reasoning_content")
        assert answer.get("thinking") == thought and bool(thought) == (think is True)
        pieces = [line["message"] for line in lines(client, "/api/chat", **body)]
        assert "".join(piece["content"] for piece in pieces) == answer["content"]
        assert "".join(piece.get("thinking", "") for piece in pieces) == (thought or "")
    generated = ok(
        client, "/api/generate", prompt="Who?", system="Be calm.", stream=False, options=options
    )
    assert (
        generated["response"]
        == ok(client, "/api/chat", stream=False, messages=messages, options=options)["message"][
            "content"
        ]
    )


def test_calls_of_tools_are_whole_and_come_back(
    tooled: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    client, read = client_of(tooled), ollama.ChatRequest.read

    def demanding(fields: dict[str, Any]) -> dict[str, Any]:
        # The model's weights are random: it calls nothing by itself.
        return read({**fields, "tool_choice": "required"})

    body = {"messages": [user("Keep it.")], "tools": TOOLS, "options": {"num_predict": 200}}
    with monkeypatch.context() as patch:
        patch.setattr(ollama.ChatRequest, "read", demanding)
        message = ok(client, "/api/chat", stream=False, **body)["message"]
        pieces = [line["message"] for line in lines(client, "/api/chat", **body)]
    calls = [call["function"] for call in message["tool_calls"]]
    assert {call["name"] for call in calls} <= {"keep", "drop"} and calls
    assert all(isinstance(call["arguments"], dict) for call in calls)
    streamed = [call["function"] for piece in pieces for call in piece.get("tool_calls", ())]
    assert streamed == calls
    result = {"role": "tool", "tool_name": "keep", "content": "kept"}
    body = {"messages": [user("Keep it."), message, result], "options": {"num_predict": 1}}
    asked = ok(client, "/api/chat", stream=False, **body)["prompt_eval_count"]
    sent = {"messages": [user("Keep it."), {"role": "assistant", "content": ""}, result]}
    assert asked > ok(client, "/api/chat", stream=False, **{**body, **sent})["prompt_eval_count"]


def test_texts_are_embedded_as_by_openais_api(
    engine: Engine, client: TestClient, pair: Pair
) -> None:
    texts = [TEXT, "é"]
    expected = ok(client, "/v1/embeddings", input=texts)
    vectors = [entry["embedding"] for entry in expected["data"]]
    answer = ok(client, "/api/embed", model="tiny:latest", input=texts)
    assert (answer["model"], answer["embeddings"]) == ("tiny", vectors)
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["total_duration"] > answer["load_duration"] >= 0
    assert ok(client, "/api/embed", input=TEXT)["embeddings"] == vectors[:1]
    assert ok(client, "/api/embeddings", prompt=TEXT) == {"embedding": vectors[0]}
    # Without a text, the model is only loaded.
    assert ok(client, "/api/embed", input="")["embeddings"] == []
    assert ok(client, "/api/embeddings") == {"embedding": []}
    short, ids = client_of(engine, Limits(context=4)), pair.tokenizer.encode(TEXT)[:4]
    [first] = ok(client, "/v1/embeddings", input=ids)["data"]
    cut = ok(short, "/api/embed", input=[TEXT])
    assert (cut["embeddings"], cut["prompt_eval_count"]) == ([first["embedding"]], 4)
    refused = short.post("/api/embed", json={"input": TEXT, "truncate": False})
    assert (
        refused.status_code == 400
        and "maximum context length is 4 tokens" in refused.json()["error"]
    )


@pytest.mark.parametrize("kind", ["json", SCHEMA], ids=["json", "schema"])
def test_a_format_binds_the_text(client: TestClient, kind: Any) -> None:
    pytest.importorskip("llguidance", reason="the extra grammar is not installed")
    options = {"num_predict": 200, "temperature": 1.0, "seed": 2, "stop": ["}"]}
    body = {"prompt": TEXT, "format": kind, "options": options, "stream": False}
    text = ok(client, "/api/generate", **body)["response"]
    assert text.lstrip().startswith("{")
    if kind != "json":
        assert set(json.loads(text + "}")) == {"name", "age"}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("chat", {"messages": [{**user("x"), "images": ["aGk="]}]}, "reads only text"),
        ("generate", {"prompt": "x", "images": ["aGk="]}, "images is not supported"),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template is not supported"),
        ("generate", {"prompt": "x", "context": [1]}, "context is not supported"),
        ("generate", {"prompt": "x", "options": {"mirostat": 1}}, "options.mirostat is not"),
        ("generate", {"prompt": "x", "options": {"top_p": 7}}, "options.top_p must be"),
        ("generate", {"prompt": "x", "options": {"num_predict": -3}}, "or -1 or -2 for no limit"),
        ("generate", {"prompt": "x", "format": "xml"}, 'format must be "json" or a JSON schema'),
        ("generate", {"prompt": "x", "think": "much"}, "think must be true, false"),
        ("generate", {"prompt": "x", "keep_alive": "soon"}, "keep_alive must be seconds"),
        ("embed", {"input": "x", "keep_alive": "soon"}, "keep_alive must be seconds"),
        ("embed", {"input": [5]}, "input[0] must be a string"),
        ("embed", {"input": "x", "dimensions": 3}, "dimensions must be"),
        ("embeddings", {"prompt": ["x"]}, "prompt must be a string"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_not_supported_is_named(
    client: TestClient, path: str, body: dict[str, Any], said: str
) -> None:
    answer = client.post(f"/api/{path}", json=body)
    assert answer.status_code == 400 and list(answer.json()) == ["error"]
    assert said in answer.json()["error"]


def test_an_error_in_a_stream_is_a_line(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with broken_after(2, monkeypatch):
        *_, last = lines(client_of(engine), "/api/generate", prompt=TEXT)
    assert list(last) == ["error"] and "failed inside" in last["error"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (0, 0),
        ("0", 0),
        (300, 300),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5s", 1.5),
        ("100ms", 0.1),
        ("30", 30),
        (-1, float("inf")),
        ("-1m", float("inf")),
    ],
)
def test_durations_are_those_of_go(text: float | str, seconds: float) -> None:
    assert seconds_of(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "m", "5 minutes", "nan", "1d"])
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(Problem, match="keep_alive"):
        seconds_of(text)


def test_models_are_loaded_kept_and_unloaded_as_a_client_says(
    llama: tuple[Path, Path], t5: tuple[Path, Path]
) -> None:
    now = 1000.0
    models = [
        ServedModel("one", lambda: (load(*llama), OPTIONS), nbytes=5),
        ServedModel("other", lambda: (load(*t5), OPTIONS), nbytes=7),
    ]
    registry = Registry(models, clock=lambda: now)
    client = client_for(Service(registry))

    def in_memory() -> dict[str, dict[str, Any]]:
        return {one["name"]: one for one in client.get("/api/ps").json()["models"]}

    listed = client.get("/api/tags").json()["models"]
    assert [(one["name"], one["model"], one["size"]) for one in listed] == [
        ("one", "one", 5),
        ("other", "other", 7),
    ]
    assert len({one["digest"] for one in listed}) == 2 and in_memory() == {}
    unknown = client.post("/api/show", json={"model": "nobody"})
    assert unknown.status_code == 404 and "not served here" in unknown.json()["error"]
    about = ok(client, "/api/show", model="one")
    assert about["capabilities"] == ["completion"] and in_memory() == {}
    # Requests of ollama's clients wait until a model is loaded.
    loaded = ok(client, "/api/chat", model="one", messages=[], keep_alive="5m")
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert loaded["message"] == {"role": "assistant", "content": ""}
    # As in ollama, a request of another API leaves the time as it is.
    ok(client, COMPLETIONS, model="one", prompt="x", max_tokens=1, keep_alive=-1)
    left = datetime.fromisoformat(in_memory()["one"]["expires_at"]) - datetime.now().astimezone()
    assert timedelta(minutes=4) < left <= timedelta(minutes=5)
    about = ok(client, "/api/show", name="one")
    family = about["model_info"]["general.architecture"]
    assert family == about["details"]["family"] == "llama"
    assert about["model_info"][f"{family}.context_length"] == in_memory()["one"]["context_length"]
    ok(client, "/api/generate", model="other", keep_alive=-1)
    assert in_memory()["other"]["expires_at"].startswith("9999")
    now += 300
    assert list(in_memory()) == ["other"]
    ended = ok(client, "/api/generate", model="other", keep_alive=0)
    assert (ended["response"], ended["done_reason"]) == ("", "unload")
    assert in_memory() == {}
    # Nothing is loaded to be unloaded.
    wait_until(lambda: registry.refresh() or not registry.engines)
    assert ok(client, "/api/chat", model="one", keep_alive=0)["done_reason"] == "unload"
    assert registry.engines == []
    assert client.get("/api/version").json()["version"].count(".") == 2
