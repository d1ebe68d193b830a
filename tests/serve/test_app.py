"""Who may send requests, limits, errors that every endpoint has, and llama.cpp's endpoints."""

import json
import re
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.engine.memory import Extent
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.serve.app import Access
from mlx_specdec.serve.engine import Engine
from mlx_specdec.serve.registry import Registry
from mlx_specdec.serve.requests import Facts
from mlx_specdec.serve.server import configuration
from mlx_specdec.serve.service import ResponseStream
from mlx_specdec.serve.settings import Limits

from ..support import commands
from ..support.serving import (
    CHAT,
    COMPLETIONS,
    OPTIONS,
    TEXT,
    broken_after,
    client_for,
    client_of,
    ok,
    running,
    service_of,
    streamed,
    user,
    wait_until,
)

KEY = {"Authorization": "Bearer secret"}


def test_another_model_is_not_found_and_not_loaded(client: TestClient, engine: Engine) -> None:
    service = service_of(engine, strict=True)
    strict = client_for(service)
    for path, body in (
        (COMPLETIONS, {"prompt": "x"}),
        (CHAT, {"messages": []}),
        ("/v1/messages", {"messages": []}),
        ("/tokenize", {"prompt": "x"}),
    ):
        answer = strict.post(path, json={**body, "model": "../../etc"})
        assert answer.status_code == 404
    assert client.post(COMPLETIONS, json={"prompt": "x", "model": 5}).status_code == 400
    answer = strict.post(COMPLETIONS, json={"prompt": "x", "model": 5})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert ok(strict, COMPLETIONS, prompt="x", max_tokens=1, model="tiny")["model"] == "tiny"
    answer = client.get("/v1/models/other")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"


def test_a_models_other_names_are_accepted_and_answered_with_its_id(engine: Engine) -> None:
    names = ("weights/tiny", "/models/weights/tiny")
    client = client_for(service_of(engine, None, *names, strict=True))
    for name in ("tiny", *names):
        assert ok(client, COMPLETIONS, prompt="x", max_tokens=1, model=name)["model"] == "tiny"
        assert client.get(f"/v1/models/{name}").json()["id"] == "tiny"
    assert client.post(COMPLETIONS, json={"prompt": "x", "model": "other/tiny"}).status_code == 404


def test_while_loading_there_is_nobody_to_ask() -> None:
    client = client_of(Engine(lambda: None, batch_size=1, waiting=1))
    for answer in (client.get("/health"), client.post(CHAT, json={"messages": [user("x")]})):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        said = answer.json()["error"]["message"]
        assert said.startswith("the model tiny is loading: try again in 1 s, or start the server")
    assert client.get("/metrics").status_code == 200


def test_a_full_queue_asks_to_come_again(llama: tuple[Path, Path]) -> None:
    with running(llama, batch_size=1, waiting=1) as engine:
        answer = client_of(engine).post(COMPLETIONS, json={"prompt": TEXT, "n": 3})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "rate_limit_error"


def test_a_request_whose_time_is_over_keeps_what_it_has(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ResponseStream._outputs

    async def until_eight_tokens(self: ResponseStream, every: float) -> AsyncIterator[Any]:
        async for each in steps(self, every):
            yield each
            if sum(choice.tokens for choice in self.choices) >= 8:
                self._deadline = 0.0

    client = client_of(engine)
    body = {"prompt": TEXT, "max_tokens": 4000, "seed": 1, "temperature": 1.0}
    with monkeypatch.context() as patch:
        patch.setattr(ResponseStream, "_outputs", until_eight_tokens)
        [choice] = ok(client, COMPLETIONS, **body)["choices"]
        assert choice["finish_reason"] == "length" and choice["text"]
        *_, last = streamed(client, COMPLETIONS, **body)
        assert last["choices"][0]["finish_reason"] == "length"
    answer = client_of(engine, Limits(seconds=0)).post(COMPLETIONS, json=body)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "timeout"
    wait_until(lambda: engine.requests == (0, 0))


def test_a_request_that_never_fits_into_memory_learns_what_would(llama: tuple[Path, Path]) -> None:
    with running(llama) as engine:
        budget = 3 * engine.budget.of_caches([Extent(5, 5, 25)]) // 2
    with running(llama, memory_budget=budget) as engine:
        client = client_of(engine)
        answer = client.post(COMPLETIONS, json={"prompt": [5] * 5, "max_tokens": 400})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "max_tokens")
        assert error["code"] == "context_length_exceeded"
        most = int(
            re.search(r"ask for at most (\d+) tokens, or raise memory-budget", answer.text)[1]
        )
        assert ok(client, COMPLETIONS, prompt=[5] * 5, max_tokens=most)
        error = client.post(COMPLETIONS, json={"prompt": [5] * 300}).json()["error"]
        assert error["param"] == "prompt" and "300 tokens, which take" in error["message"]
        # One fits at a time, and the others wait.
        answers = ok(client, COMPLETIONS, prompt=[5] * 5, n=4, max_tokens=9)
        assert len(answers["choices"]) == 4
        wait_until(lambda: engine.reserved_bytes == 0)
        reply = client.get("/metrics").text
        assert f"mlx_specdec:memory_budget_bytes {budget}" in reply
        assert "mlx_specdec:memory_reserved_bytes 0" in reply


def test_a_context_may_be_cut(engine: Engine) -> None:
    client = client_of(engine, Limits(context=20))
    assert client.get("/props").json()["n_ctx"] == 20
    reply = ok(client, COMPLETIONS, prompt=[5] * 12)
    assert reply["usage"]["completion_tokens"] == 8
    # A larger limit has no effect.
    for most in (8, 9, 10**30, -1):
        again = ok(client, COMPLETIONS, prompt=[5] * 12, max_tokens=most)
        assert again["choices"] == reply["choices"]
    assert reply["choices"][0]["finish_reason"] == "length"
    answer = client.post(COMPLETIONS, json={"prompt": [5] * 20})
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_more_choices_than_an_engine_takes_are_not_to_be_tried_again(engine: Engine) -> None:
    client = client_of(engine, Limits(waiting=0))
    assert client.get("/props").json()["limits"]["choices"] == 4
    answer = client.post(COMPLETIONS, json={"prompt": TEXT, "n": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"


@pytest.mark.parametrize("path", ["/v1/models", "/nothing"])
def test_only_the_key_opens(engine: Engine, path: str) -> None:
    client = client_of(engine, access=Access(["other", "sécret"]))
    for headers in ({}, {"Authorization": "Bearer sécre"}, {"x-api-key": "sêcret"}):
        sent = {name: value.encode() for name, value in headers.items()}
        answer = client.get(path, headers=sent)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    for headers in ({"authorization": "bearer sécret"}, {"x-api-key": "other"}):
        sent = {name: value.encode() for name, value in headers.items()}
        assert client.get(path, headers=sent).status_code != 401
    for ask in (client.get, client.head):
        assert ask("/health").status_code == ask("/").status_code == 200
    assert client.post("/", json={"inputs": TEXT}).status_code == 401


def test_pages_of_others_may_not_ask(engine: Engine) -> None:
    foreign = {"Origin": "https://evil.example"}
    client = client_of(engine)
    answer = client.post(COMPLETIONS, json={"prompt": TEXT}, headers=foreign)
    assert answer.status_code == 403 and "access-control-allow-origin" not in answer.headers
    # A name that somebody made point here.
    rebound = {"Origin": "http://evil.example:8080", "Host": "evil.example:8080"}
    assert client.get("/v1/models", headers=rebound).status_code == 403
    assert client.get("/v1/models", headers={"Origin": "http://[evil"}).status_code == 403
    own = {"Origin": "http://localhost:8080", "Host": "localhost:8080"}
    assert client.get("/v1/models", headers=own).status_code == 200
    named = client_of(engine, access=Access(["secret"], ["https://evil.example"]))
    answer = named.get("/v1/models", headers={**foreign, **KEY})
    assert answer.headers["access-control-allow-origin"] == "https://evil.example"
    preflight = {**foreign, "Access-Control-Request-Method": "POST"}
    assert named.options(CHAT, headers=preflight).status_code == 200
    assert named.get("/v1/models", headers={"Origin": "https://other.example"}).status_code == 403


def test_a_name_that_somebody_made_point_here_is_refused(engine: Engine) -> None:
    checked = client_of(
        engine, access=Access(origins=["https://their.example"], loopback_name="mymachine")
    )
    # On another address, and for pages of any origin, every name is as good.
    others = [
        client_of(engine, access=access)
        for access in (Access(), Access(origins=["*"], loopback_name="mymachine"))
    ]
    for host, status in {
        "localhost:8080": 200,
        "[::1]:8080": 200,
        "192.168.1.2:8080": 200,
        "MyMachine:8080": 200,
        "host.docker.internal:8080": 200,
        "their.example": 200,
        "evil.example:8080": 403,
        "127.0.0.1.evil.example": 403,
        "[evil": 403,
    }.items():
        for path in ("/v1/models", "/health", "/"):
            answer = checked.get(path, headers={"Host": host})
            assert answer.status_code == status, host
            if status == 403:
                assert answer.json()["error"]["code"] == "host_not_allowed"
        for client in others:
            assert client.get("/", headers={"Host": host}).status_code == 200


def test_an_engine_that_fails_tells_so_in_a_chunk_and_no_more(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"prompt": TEXT, "max_tokens": 200}
    with broken_after(5, monkeypatch):
        answer = client.post(COMPLETIONS, json={**body, "stream": True})
        assert answer.status_code == 200
        *events, rest = answer.text.split("\n\n")
        error = json.loads(events[-1].removeprefix("data: "))["error"]
        assert error["type"] == "server_error" and len(events) > 1 and rest == ""
    with broken_after(5, monkeypatch):
        answer = client.post(COMPLETIONS, json=body)
        assert answer.status_code == 500 and answer.headers["x-should-retry"] == "false"
        assert "/" not in answer.text.replace("\\/", "")
    assert ok(client, COMPLETIONS, **body)


@pytest.mark.parametrize("message", commands.SAID)
def test_a_client_reads_that_memory_has_ended_or_the_gpu_has_given_up(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    def fail(self: Scheduler) -> None:
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "step", fail)
        answer = client.post(COMPLETIONS, json={"prompt": TEXT, "max_tokens": 3})
    assert answer.status_code == 500
    said = answer.json()["error"]["message"]
    assert commands.SAID[message] in said and "RuntimeError" not in said
    ok(client, COMPLETIONS, prompt=TEXT, max_tokens=3)


def test_a_handler_that_fails_shows_no_path(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Registry, *about: object) -> None:
        raise ValueError("/a/path/of/ours")

    monkeypatch.setattr(Registry, "parser", broken)
    with caplog.at_level("INFO", "mlx_specdec.serve.app"):
        answer = client.post(CHAT, json={"messages": [user("x")]})
    assert [f"path={CHAT} status=500" in line for line in caplog.messages] == [True]
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "something went wrong here"


def test_the_page_is_one_file_and_asks_this_server_alone(engine: Engine) -> None:
    client = client_of(engine, access=Access(["secret"]))
    answer = client.get("/")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in answer.headers["content-security-policy"]
    assert "://" not in answer.text
    # Of an address nobody can make a name.
    own = {"Origin": "http://192.168.1.5:8080", "Host": "192.168.1.5:8080"}
    assert client.get("/v1/models", headers={**own, **KEY}).status_code == 200


def test_what_is_described_is_there(client: TestClient) -> None:
    answer = client.get("/openapi.json").json()
    paths = {route.path.replace(":path", "") for route in client.app.routes}
    described = answer["paths"].keys()
    assert paths - {"/openapi.json"} == {
        *described,
        *(each.removeprefix("/v1") for each in described),
    }
    references = re.findall(r'"\$ref": "#/components/schemas/(\w+)"', json.dumps(answer))
    assert {*references} == answer["components"]["schemas"].keys()


def test_unsupported_fields_are_described_by_the_values_that_change_nothing(
    client: TestClient,
) -> None:
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    fields = schemas["TextRequest"]["properties"]
    assert fields["min_tokens"] == {"enum": [0, None]} and fields["adapters"] == {"enum": [None]}
    assert fields["n"]["anyOf"][0] == {"type": "integer", "minimum": 1}
    assert schemas["Speculative"]["additionalProperties"] is False
    assert "prompt" in schemas["TextRequest"]["required"]


def test_paths_without_v1_are_the_same(client: TestClient) -> None:
    body = {"prompt": "def", "max_tokens": 4, "seed": 1}
    one, other = (ok(client, path, **body)["choices"] for path in (COMPLETIONS, "/completions"))
    assert one == other
    assert client.get("/models").json() == client.get("/v1/models").json()


def test_every_answer_has_an_id(client: TestClient) -> None:
    answers = [client.get("/health"), client.get("/nothing"), client.post(CHAT, json={})]
    ids = {answer.headers["x-request-id"] for answer in answers}
    assert len(ids) == 3 and {answer.headers["request-id"] for answer in answers} == ids


def test_the_model_is_listed_as_clients_read_it(client: TestClient) -> None:
    listed = client.get("/v1/models").json()
    [one], [other] = listed["data"], listed["models"]
    assert one["id"] == one["display_name"] == other["slug"] == "tiny"
    size = one["context_length"]
    assert size == one["max_model_len"] == one["meta"]["n_ctx_train"] == other["context_window"]
    # One missing field drops Codex's whole catalogue.
    assert {"display_name", "shell_type", "visibility", "supported_in_api", "priority"} <= {*other}
    assert {"truncation_policy", "base_instructions", "supported_reasoning_levels"} <= {*other}
    properties = client.get("/props").json()
    assert properties["default_generation_settings"]["n_ctx"] == size
    assert properties["modalities"] == {"vision": False, "audio": False}


@pytest.mark.parametrize("key", [None, "secret"])
def test_clients_are_configured_by_lines(key: str | None) -> None:
    url, facts = "http://127.0.0.1:9", Facts(100, ("tools",), True, "llama", "float32")
    lines = configuration(url, "tiny", facts, key)
    clients = ("Codex", "Claude Code", "Cline", "Continue", "opencode")
    assert all(line.startswith(each) for line, each in zip(lines, clients, strict=True))
    assert all(url in line and "secret" not in line for line in lines)
    provider = re.search(r"model_providers.local=(\{.*\})'", lines[0])
    assert provider is not None
    table = tomllib.loads(f"local = {provider[1]}")["local"]
    assert table["wire_api"] == "responses" and ("env_key" in table) == (key is not None)
    assert json.loads(lines[4].removeprefix("opencode").strip())["provider"]["local"]


def test_tokens_and_texts(client: TestClient, pair: Pair) -> None:
    ids = pair.tokenizer.encode("déjà vu")
    for body in ({"content": "déjà vu"}, {"prompt": "déjà vu"}):
        answer = ok(client, "/tokenize", **body)
        assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 4096)
    messages = [{"role": "user", "content": "a"}]
    answer = ok(client, "/tokenize", messages=messages)
    assert answer["tokens"] == pair.tokenizer.encode("USER: a\nASSISTANT:")
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
        answer = client.get("/health")
        assert answer.status_code == (503 if failed == 3 else 200)
    assert answer.json()["error"]["code"] == "no_progress" and answer.headers["retry-after"]
    ok(client, COMPLETIONS, **body)
    answer = client.get("/health").json()
    assert (answer["status"], answer["last_failure"]) == ("ok", "ValueError")
    assert answer["failures"] >= 3


def test_props_say_what_is_served(client: TestClient) -> None:
    answer = client.get("/props").json()
    assert answer["chat"] == "role prefixes"
    assert (answer["total_slots"], answer["n_ctx"], answer["rule"]) == (4, 4096, "coupled")
    assert answer["default_generation_settings"]["max_tokens"] == OPTIONS.max_tokens
    assert "/" not in answer["model_alias"]


def test_figures_are_counted_under_vllms_names(llama: tuple[Path, Path]) -> None:
    with running(llama) as engine:
        client = client_of(engine)
        reply = [ok(client, COMPLETIONS, prompt=TEXT, max_tokens=10 + each) for each in range(3)]
        answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = answer.text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[a-z0-9_:]+(\{[^}]*\})?", name) for name in values)
    labels = '{model_name="tiny",engine="0"}'
    drafted = sum(each["timings"]["draft_n"] for each in reply)
    accepted = sum(each["timings"]["draft_n_accepted"] for each in reply)
    prompts = sum(each["usage"]["prompt_tokens"] for each in reply)
    for name, value in {
        f"vllm:prompt_tokens_total{labels}": prompts,
        f"vllm:num_requests_running{labels}": 0.0,
        f"vllm:generation_tokens_total{labels}": 33,
        f"vllm:spec_decode_num_draft_tokens_total{labels}": drafted,
        f"vllm:spec_decode_num_accepted_tokens_total{labels}": accepted,
        f"vllm:time_to_first_token_seconds_count{labels}": 3,
        f"vllm:e2e_request_latency_seconds_count{labels}": 3,
        'vllm:request_success_total{model_name="tiny",engine="0",finished_reason="length"}': 3,
    }.items():
        assert values[name] == str(value), name
    by_place = [name for name in values if "per_pos" in name]
    assert sum(int(values[name]) for name in by_place) == accepted
    assert len({line for line in lines if line.startswith("# TYPE")}) == len(
        [line for line in lines if line.startswith("# TYPE")]
    )
