"""Every API says in words that clients look for that a prompt does not fit the context."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Server, checkpoint, served, wait_until

LONGEST = 64
LONG, ENDLESS = "é" * 100, "é" * (40 * LONGEST)
"""A text with more tokens than the context has, and one that is refused before it is tokenized."""
APIS: dict[str, Any] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/messages": lambda text: {
        "max_tokens": 4,
        "messages": [{"role": "user", "content": text}],
    },
    "/api/chat": lambda text: {"messages": [{"role": "user", "content": text}], "stream": False},
    "/api/generate": lambda text: {"prompt": text, "stream": False},
    "/generate": lambda text: {"inputs": text},
}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"), template=TEMPLATE)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with served("--model", model, "--max-model-len", LONGEST) as running:
        yield running


@pytest.fixture(scope="module")
def small(model: Path) -> Iterator[Server]:
    """A server with memory for few tokens."""
    with served("--model", model, "--memory-budget", "256KB") as running:
        yield running


def refused(server: Server, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the error of a request that does not fit, and its message."""
    answer = server.ask(path, body)
    assert answer.status == (422 if path == "/generate" else 400), answer
    error = answer.json["error"]
    if isinstance(error, str):
        return answer.json, error
    if path != "/v1/messages":
        assert error["code"] == "context_length_exceeded"
    return error, error["message"]


@pytest.mark.parametrize("text", [LONG, ENDLESS], ids=["long", "endless"])
@pytest.mark.parametrize("path", APIS)
def test_a_prompt_that_does_not_fit_names_the_context(server: Server, path: str, text: str) -> None:
    error, said = refused(server, path, APIS[path](text))
    assert f"maximum context length is {LONGEST} tokens" in said
    found = re.match(r"prompt is too long: [^0-9]*(\d+) tokens > (\d+) maximum", said)
    assert found is not None, said
    assert int(found[1]) > int(found[2]) == LONGEST - 1
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"


def test_a_prompt_without_room_in_memory_names_the_tokens_that_have(small: Server) -> None:
    longest = small.get("/props").json["n_ctx"]
    for path in ("/v1/completions", "/v1/messages", "/v1/responses", "/api/chat"):
        _, said = refused(small, path, APIS[path]("é" * (longest // 2)))
        found = re.search(r"maximum context length is (\d+) tokens", said)
        assert found is not None and "memory-budget" in said, said
        assert said.startswith("prompt is too long: ")
        most = int(found[1])
        assert 0 < most < longest // 2
    prompt = [5] * most
    assert refused(small, "/v1/completions", {"prompt": prompt})
    usage = small.ok("/v1/completions", prompt=prompt[1:], max_tokens=1)["usage"]
    assert usage["completion_tokens"] == 1
    _, said = refused(small, "/v1/embeddings", {"input": [5] * (longest // 2)})
    assert re.search(r"maximum context length is \d+ tokens", said)


def test_max_tokens_without_room_in_memory_names_the_tokens_that_have(small: Server) -> None:
    longest = small.get("/props").json["n_ctx"]
    wanted = longest - 5
    error, said = refused(small, "/v1/completions", {"prompt": [5] * 5, "max_tokens": wanted})
    assert error["param"] == "max_tokens"
    found = re.fullmatch(
        rf"input length and `max_tokens` exceed context limit: 5 \+ {wanted} > (\d+); this model's "
        r"maximum context length is (\d+) tokens, .*: ask for at most (\d+) tokens, .*",
        said,
    )
    assert found is not None, said
    assert int(found[1]) == int(found[2]) == 5 + int(found[3])
    # One request with so many tokens fits at a time, and the others wait.
    body = {"prompt": [5] * 5, "max_tokens": int(found[3])}
    assert small.ask("/v1/completions", {**body, "max_tokens": int(found[3]) + 1}).status == 400
    assert len(small.ok("/v1/completions", **body, ignore_eos=True, n=2)["choices"]) == 2
    model = small.get("/props").json["model_alias"]
    reserved, budget = (
        f'mlx_specdec:memory_{name}_bytes{{model_name="{model}"}}'
        for name in ("reserved", "budget")
    )
    wait_until(lambda: small.metrics()[reserved] == 0)
    assert small.metrics()[budget] == 256_000
