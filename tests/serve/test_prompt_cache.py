"""What was read is not read again, is told of in every dialect, and changes no text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra server is not installed")

from starlette.testclient import TestClient

from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache_files import Store
from mlx_specdec.serve.app import Access

from ..support.serving import CHAT, COMPLETIONS, OPTIONS, client_of, ok, running, streamed

QUESTION = {"role": "user", "content": "def read_lines"}


@pytest.fixture
def system(request: pytest.FixtureRequest) -> str:
    """A text that no other test begins with."""
    return f"{request.node.name} reads files, line by line, and says nothing else. " * 2


@pytest.fixture(scope="module")
def client(llama: tuple[Path, Path]) -> Iterator[TestClient]:
    with running(llama, store=Store(1 << 26)) as engine:
        yield client_of(engine)


def cached(report: dict[str, Any]) -> int:
    return report["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_a_conversation_is_read_once(client: TestClient, system: str) -> None:
    talk = [{"role": "system", "content": system}, QUESTION]
    body = {"max_tokens": 12, "temperature": 0.9, "seed": 4}
    first = ok(client, CHAT, messages=talk, **body)
    assert first["timings"]["cache_n"] == cached(first) < 30
    answer = first["choices"][0]["message"]
    reply = ok(client, CHAT, messages=[*talk, answer, {"role": "user", "content": "x"}], **body)
    usage, timings = reply["usage"], reply["timings"]
    before = first["usage"]["prompt_tokens"]
    assert before - 1 <= cached(reply) < usage["prompt_tokens"]
    assert timings["cache_n"] == cached(reply)
    assert timings["prompt_n"] == usage["prompt_tokens"] - cached(reply)


def test_the_text_is_that_of_the_prompt_alone(
    client: TestClient, system: str, pair: Pair, alone: Callable[..., str]
) -> None:
    for temperature in (0.0, 0.9):
        for tail in ("a", "b", "a", "a c"):
            body = {"max_tokens": 12, "temperature": temperature, "seed": 4}
            answer = ok(client, COMPLETIONS, prompt=system + tail, **body)
            ids = pair.tokenizer.encode(system + tail)
            wanted = alone(ids, max_tokens=12, temperature=temperature, seed=4)
            assert answer["choices"][0]["text"] == wanted
    assert cached(answer) > 20


def test_choices_count_a_prompt_once(client: TestClient, system: str) -> None:
    for _ in range(2):
        answer = ok(client, COMPLETIONS, prompt=system, max_tokens=2, n=3)
    assert cached(answer) == answer["usage"]["prompt_tokens"] - 1


def test_every_dialect_tells_of_it(client: TestClient, system: str) -> None:
    body = {"messages": [{"role": "user", "content": system}], "max_tokens": 3}
    first, second = (ok(client, "/v1/messages", **body)["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] < 30 and first["output_tokens"] == 3
    assert second["input_tokens"] == 1
    read = first["input_tokens"] + first["cache_read_input_tokens"]
    assert second["cache_read_input_tokens"] == read - 1
    wanted = {"stream_options": {"include_usage": True}, "prompt": system, "max_tokens": 3}
    streamed(client, COMPLETIONS, **wanted)
    *_, last = streamed(client, COMPLETIONS, **wanted)
    assert cached(last) == last["usage"]["prompt_tokens"] - 1
    asked = {"input": system, "max_output_tokens": 3}
    _, usage = (ok(client, "/v1/responses", **asked)["usage"] for _ in range(2))
    assert usage["input_tokens_details"] == {"cached_tokens": usage["input_tokens"] - 1}
    events = client.post("/v1/messages", json={**body, "stream": True}).text
    assert f'"cache_read_input_tokens": {second["cache_read_input_tokens"]}' in events


def test_metrics_count_hits_in_tokens(client: TestClient, system: str) -> None:
    before = metrics(client)
    answer = [ok(client, COMPLETIONS, prompt=system, max_tokens=2) for _ in range(2)]
    size, hits = answer[0]["usage"]["prompt_tokens"], cached(answer[0]) + cached(answer[1])
    assert hits >= size - 1
    after = metrics(client)
    for name, more in (
        ("vllm:prefix_cache_queries_total", 2 * size),
        ("vllm:prefix_cache_hits_total", hits),
        ("vllm:prompt_tokens_total", 2 * size),
        ("llamacpp:prompt_tokens_total", 2 * size - hits),
    ):
        assert after[name] - before[name] == more, name
    assert after["mlx_specdec:prompt_cache_bytes"] > before["mlx_specdec:prompt_cache_bytes"]


def metrics(client: TestClient) -> dict[str, float]:
    lines = [each for each in client.get("/metrics").text.splitlines() if each[0] != "#"]
    return {line.split("{")[0].split(" ")[0]: float(line.split(" ")[-1]) for line in lines}


def test_nobody_hits_what_another_key_has_sent(
    llama: tuple[Path, Path], system: str, tmp_path: Path
) -> None:
    """Neither in memory nor on disk."""

    def hits(client: TestClient, key: str) -> int:
        body = {"prompt": system, "max_tokens": 2}
        return cached(client.post(COMPLETIONS, json=body, headers={"x-api-key": key}).json())

    for order, hit in (
        (("one", "two", "two", "one"), [False, False, True, True]),
        (("two", "three", "one"), [True, False, True]),
    ):
        with running(llama, store=Store(1 << 26, tmp_path)) as engine:
            client = client_of(engine, access=Access(["one", "two", "three"]))
            assert [hits(client, key) > 0 for key in order] == hit


def test_nobody_drafts_from_what_another_key_has_written(llama: tuple[Path, Path]) -> None:
    options = replace(OPTIONS, proposer="ngram", num_draft=8)
    with running((llama[0], None), options, history=True) as engine:
        client = client_of(engine, access=Access(["one", "two"]))

        def asked(key: str) -> tuple[str, int]:
            body = {"prompt": "def read_lines", "max_tokens": 40, "temperature": 0}
            answer = client.post(COMPLETIONS, json=body, headers={"x-api-key": key}).json()
            return answer["choices"][0]["text"], answer["timings"]["draft_n_accepted"]

        first, again, other, others = asked("one"), asked("one"), asked("two"), asked("two")
        assert {each[0] for each in (first, again, other, others)} == {first[0]}
        assert other[1] == first[1] < again[1] == others[1]
        metrics = client.get("/metrics", headers={"x-api-key": "one"}).text
        assert f"history_bytes {engine.nbytes[1]}" in metrics
        assert engine.nbytes[1] > 0
