"""llama.cpp's endpoints: tokens, properties, health and metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="the extra server is not installed")

from starlette.testclient import TestClient

from mlx_specdec.engine.pair import Pair
from mlx_specdec.serve.engine import Engine

from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    TEXT,
    broken_after,
    client_of,
    ok,
    running,
    wait_until,
)


def test_tokens_and_texts(client: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer.encode("déjà vu")
    for body in ({"content": "déjà vu"}, {"prompt": "déjà vu"}):
        told = ok(client, "/tokenize", **body)
        assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 4096)
    messages = [{"role": "user", "content": "a"}]
    told = ok(client, "/tokenize", messages=messages)
    assert told["tokens"] == pair.tokenizer.encode("USER: a\nASSISTANT:")
    assert ok(client, "/detokenize", tokens=ids)["content"] == "déjà vu"
    for wrong in ({}, {"content": "a", "prompt": "a"}, {"messages": messages, "content": 5}):
        assert client.post("/tokenize", json=wrong).status_code == 400
    for tokens in (None, "x", [1.5], [-1], [10**9]):
        assert client.post("/detokenize", json={"tokens": tokens}).status_code == 400


def test_health_and_paths_that_are_none(client: TestClient) -> None:
    assert client.get("/health").json().items() >= {"status": "ok"}.items()
    for answer, status in ((client.get("/nothing"), 404), (client.get(CHAT), 405)):
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = client.put("/")
    assert answer.json()["error"]["message"] == ("this path does not take PUT: use GET, HEAD, POST")


def test_health_is_that_texts_make_progress(
    engine: Engine, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": TEXT, "max_tokens": 3}
    for failed in range(1, 4):
        with broken_after(0, monkeypatch):
            assert client.post(COMPLETIONS, json=body).status_code == 500
        wait_until(lambda: engine.failures.passes == failed)  # noqa: B023
        told = client.get("/health")
        assert told.status_code == (503 if failed == 3 else 200)
    assert told.json()["error"]["code"] == "no_progress" and told.headers["retry-after"]
    ok(client, COMPLETIONS, **body)
    told = client.get("/health").json()
    assert (told["status"], told["last_failure"]) == ("ok", "ValueError")
    assert told["failures"] >= 3


def test_props_say_what_is_served(client: TestClient) -> None:
    told = client.get("/props").json()
    assert told["chat"] == "role prefixes"
    assert (told["total_slots"], told["n_ctx"], told["rule"]) == (4, 4096, "coupled")
    assert told["default_generation_settings"]["max_tokens"] == OPTIONS.max_tokens
    assert "/" not in told["model_alias"]


def test_figures_are_counted_under_both_families_of_names(llama: tuple[Path, Path]) -> None:
    with running(llama) as engine:
        client = client_of(engine)
        told = [ok(client, COMPLETIONS, prompt=TEXT, max_tokens=10 + each) for each in range(3)]
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[a-z0-9_:]+(\{[^}]*\})?", name) for name in values)
    labels = '{model_name="tiny",engine="0"}'
    drafted = sum(each["timings"]["draft_n"] for each in told)
    accepted = sum(each["timings"]["draft_n_accepted"] for each in told)
    prompts = sum(each["usage"]["prompt_tokens"] for each in told)
    for name, value in {
        "llamacpp:prompt_tokens_total": prompts,
        "llamacpp:tokens_predicted_total": 33,
        "llamacpp:spec_decode_num_draft_tokens_total": drafted,
        "llamacpp:spec_decode_num_accepted_tokens_total": accepted,
        "llamacpp:requests_processing": 0,
        f"vllm:generation_tokens_total{labels}": 33,
        f"vllm:spec_decode_num_draft_tokens_total{labels}": drafted,
        f"vllm:spec_decode_num_accepted_tokens_total{labels}": accepted,
        f"vllm:time_to_first_token_seconds_count{labels}": 3,
        f"vllm:e2e_request_latency_seconds_count{labels}": 3,
        'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="length"}': 3,
    }.items():
        assert values[name] == str(value), name
    by_place = [name for name in values if name.startswith("llamacpp:") and "per_pos" in name]
    assert sum(int(values[name]) for name in by_place) == accepted
    assert len({line for line in lines if line.startswith("# TYPE")}) == len(
        [line for line in lines if line.startswith("# TYPE")]
    )
