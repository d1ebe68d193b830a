"""Several models with memory for two: when each is loaded and unloaded, and what requests see."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .support import Server, checkpoint, post, served, wait_until

COMPLETIONS = "/v1/completions"
PROMPT = "def read_lines"
NAMES = ("a", "b", "c")
WIDE: dict[str, Any] = {"intermediate_size": 1024, "max_position_embeddings": 200_000}
WIDE |= {"num_hidden_layers": 1, "num_key_value_heads": 1}
"""A megabyte of weights, and little memory for each token."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with three models, one that is too large, and one whose file is cut."""
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate((*NAMES, "cut")):
        checkpoint(directory / name, seed=seed, **WIDE)
    checkpoint(directory / "large", **{**WIDE, "intermediate_size": 1 << 14})
    file = directory / "cut" / "model.safetensors"
    file.rename(file.with_suffix(".complete"))
    file.write_bytes(file.with_suffix(".complete").read_bytes()[:-1000])
    return directory


@pytest.fixture(scope="module")
def flags(models: Path) -> list[object]:
    budget = 3 * (models / "a" / "model.safetensors").stat().st_size
    names = (*NAMES, "large", "cut")
    named = (word for name in names for word in ("--model", models / name))
    return [*named, "--memory-budget", budget, "--no-cost-cache", "--batch-size", 4]


@pytest.fixture(scope="module")
def server(flags: list[object]) -> Iterator[Server]:
    with served(*flags) as running:
        yield running


@pytest.fixture
def unloaded(server: Server) -> Server:
    """The server when no model is in memory."""
    for name in NAMES:
        server.ok("/api/generate", model=name, keep_alive=0)
    wait_until(lambda: set(states(server).values()) == {"unloaded"})
    return server


def states(server: Server) -> dict[str, str]:
    listed = server.get("/v1/models").json["data"]
    return {one["id"]: one["status"]["value"] for one in listed if one["id"] in NAMES}


def use(server: Server, *names: str) -> None:
    """Load models."""
    for name in names:
        assert server.ok("/api/generate", model=name, stream=False)["done_reason"] == "load"


def ask(server: Server, name: str) -> Any:
    return server.ask(COMPLETIONS, {"model": name, "prompt": PROMPT, "max_tokens": 12})


def written(server: Server, name: str) -> str:
    """Wait until a model is loaded, and return what it writes."""
    body = {"model": name, "prompt": PROMPT, "options": {"num_predict": 12}, "raw": True}
    return str(server.ok("/api/generate", **body, stream=False)["response"])


@cache
def alone(model: Path) -> str:
    return generate(load(model), PROMPT, Options(max_tokens=12, regular=True)).text


def test_a_request_waits_until_its_model_is_loaded(unloaded: Server, models: Path) -> None:
    about = unloaded.get("/props?model=b")
    assert about.status == 503 and b"b is not in memory" in about.body
    answer = ask(unloaded, "b")
    assert answer.status == 200
    assert (answer.json["model"], answer.json["choices"][0]["text"]) == ("b", alone(models / "b"))
    unloaded.waits_for("loaded b, ")
    assert states(unloaded) == {"a": "unloaded", "b": "loaded", "c": "unloaded"}


def test_the_least_recently_used_model_leaves(unloaded: Server) -> None:
    use(unloaded, "a", "b", "a", "c")
    assert states(unloaded) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
    metrics = unloaded.metrics()
    for name, loaded in (("a", 1), ("b", 0), ("c", 1)):
        assert metrics[f'mlx_specdec:model_loaded{{model_name="{name}"}}'] == loaded
        assert (metrics[f'mlx_specdec:model_bytes{{model_name="{name}"}}'] > 0) == bool(loaded)
    assert ask(unloaded, "a").status == ask(unloaded, "c").status == 200


def long(name: str) -> bytes:
    """Return a request whose answer lasts longer than a test asks other things."""
    body = {"model": name, "prompt": PROMPT, "max_tokens": 600, "ignore_eos": True}
    return post(COMPLETIONS, {**body, "stream": True}, "Connection: close")


def running(server: Server, name: str) -> bool:
    return server.requests(name) == (1, 0)


def test_an_idle_model_leaves_before_a_busy_one_that_is_older(unloaded: Server) -> None:
    use(unloaded, "a", "b")
    with unloaded.connect(long("a")):
        wait_until(lambda: running(unloaded, "a"))
        assert ask(unloaded, "b").status == 200
        use(unloaded, "c")
        assert running(unloaded, "a")
        assert states(unloaded) == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_a_busy_model_finishes_its_requests_and_takes_no_more_before_it_leaves(
    flags: list[object], models: Path
) -> None:
    with served(*flags, "--no-wait") as server, contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            wait_until(lambda name=name: ask(server, name).status == 200)
        older = stack.enter_context(server.connect(long("a")))
        wait_until(lambda: running(server, "a"))
        stack.enter_context(server.connect(long("b")))
        wait_until(lambda: running(server, "b"))
        assert ask(server, "c").status == 503
        assert ask(server, "a").status == 503 and ask(server, "b").status == 200
        assert states(server) == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        text = stack.enter_context(older.makefile("rb")).read()
        assert b'"finish_reason": "length"' in text and b"data: [DONE]" in text
        wait_until(lambda: ask(server, "c").status == 200)
        assert ask(server, "c").json["choices"][0]["text"] == alone(models / "c")


def test_a_load_that_fails_is_reported_to_all_who_wait_and_tried_again(
    unloaded: Server, models: Path
) -> None:
    file = models / "cut" / "model.safetensors"
    with ThreadPoolExecutor(3) as pool:
        body = {"model": "cut", "prompt": PROMPT, "stream": False}
        answers = [pool.submit(unloaded.ask, "/api/generate", body) for _ in range(3)]
        for answer in (future.result() for future in answers):
            assert answer.status == 500 and b"the server's log says why" in answer.body
            assert answer.headers["x-should-retry"] == "false"
    file.with_suffix(".complete").rename(file)
    use(unloaded, "cut")
    unloaded.ok("/api/generate", model="cut", keep_alive=0)


def test_a_model_that_is_too_large_is_refused(unloaded: Server) -> None:
    answer = ask(unloaded, "large")
    assert answer.status == 500 and answer.headers["x-should-retry"] == "false"
    assert "raise --memory-budget" in answer.json["error"]["message"]


def test_requests_over_three_models_are_answered_as_alone(unloaded: Server, models: Path) -> None:
    names = [name for name in NAMES for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda name: written(unloaded, name), names)
        assert list(texts) == [alone(models / name) for name in names]
    assert list(states(unloaded).values()).count("loaded") <= 2
