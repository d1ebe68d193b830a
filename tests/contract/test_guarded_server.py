"""A server with keys: who may ask, its queue, and what the cache of each key holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from .support import Answer, Server, checkpoint, post, served, wait_until

CALLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{% set tool_call = call.function %}<tool_call>{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}'
)
COMPLETIONS = "/v1/completions"
ONE, OTHER = "one", "sécret"
CACHED = "A text that only one key has sent, and that is kept on the disk. " * 2
ENDLESS = {"prompt": "def", "max_tokens": 100_000, "ignore_eos": True, "stream": True}


def key(name: str) -> dict[str, str]:
    """Return the header with a key. HTTP's headers are read as Latin-1."""
    return {"x-api-key": name.encode().decode("latin-1")}


def hits(server: Server, prompt: str, name: str) -> int:
    """Return the number of tokens of a prompt that were in the cache of a key."""
    answer = server.ask(COMPLETIONS, {"prompt": prompt, "max_tokens": 2}, **key(name))
    return int(answer.json["timings"]["cache_n"])


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    directory = tmp_path_factory.mktemp("guarded")
    model = checkpoint(
        directory / "model",
        template=CALLS,
        tokens=("<tool_call>", "</tool_call>"),
        max_position_embeddings=200_000,
    )
    cache = ("--prompt-cache-dir", directory / "cache", "--prompt-cache-bytes", "64MB")
    return ["--model", model, "--no-cost-cache", *cache, "--proposer", "ngram", "--num-draft", 8]


@dataclass(frozen=True)
class First:
    """What the first server answers: the numbers of cached tokens of a prompt before and after it
    has unloaded its model, and its health in between."""

    before: int
    health: Answer
    after: int


@pytest.fixture(scope="module")
def first(flags: list[object]) -> First:
    """Fill the prompt cache with the prompt of one key, and unload the idle model."""
    more = ("--idle-unload", 0.001)
    with served(*flags, *more, MLX_SPECDEC_API_KEY=f"{ONE} hush") as server:
        before = hits(server, CACHED, ONE)
        loaded = 'mlx_specdec:model_loaded{model_name="model"}'
        wait_until(lambda: not server.metrics(**key("hush"))[loaded])
        return First(before, server.get("/health"), hits(server, CACHED, ONE))


@pytest.fixture(scope="module")
def server(flags: list[object], first: First) -> Iterator[Server]:
    """A server that is started again with the prompt cache of another one."""
    keys = ("--api-key", ONE, "--api-key", OTHER, "--cors-origin", "https://their.example")
    with served(*flags, *keys, "--batch-size", 1) as running:
        yield running


def test_an_idle_model_is_unloaded_and_loaded_again(first: First) -> None:
    """Its prompt cache on the disk stays."""
    assert first.health.status == 200
    assert first.before == 0 and first.after > 20


def test_only_the_key_opens(server: Server) -> None:
    for path in ("/v1/models", "/nothing"):
        for name in ("", "sécre", "sêcret", "hush"):
            answer = server.get(path, **key(name))
            assert answer.status == 401 and answer.json["error"]["code"] == "invalid_api_key"
        bearer = {"authorization": f"bearer {key(OTHER)['x-api-key']}"}
        for headers in (bearer, key(ONE)):
            assert server.get(path, **headers).status != 401
    for method in ("GET", "HEAD"):
        for path in ("/health", "/"):
            assert server.ask(path, method=method).status == 200
    assert server.ask("/", {"inputs": "x"}).status == 401
    assert server.get("/v1/models", **key(ONE)).headers["keep-alive"] == "timeout=70"


def test_pages_of_others_may_not_ask(server: Server) -> None:
    def status(origin: str, host: str = "localhost", path: str = "/v1/models") -> int:
        return server.get(path, **key(ONE), Origin=origin, Host=host).status

    foreign = {"Origin": "https://evil.example", **key(ONE)}
    answer = server.ask(COMPLETIONS, {"prompt": "x"}, **foreign)
    assert answer.status == 403 and "access-control-allow-origin" not in answer.headers
    # A name that somebody made point here.
    assert status("http://evil.example:8080", "evil.example:8080") == 403
    assert status("http://[evil") == 403
    for own in ("localhost:8080", "192.168.1.5:8080"):
        assert status(f"http://{own}", own) == 200
    named = {"Origin": "https://their.example", **key(ONE)}
    allowed = server.get("/v1/models", **named).headers["access-control-allow-origin"]
    assert allowed == "https://their.example"
    preflight = {"Origin": "https://their.example", "Access-Control-Request-Method": "POST"}
    assert server.ask(COMPLETIONS, method="OPTIONS", **preflight).status == 200


def test_a_full_queue_asks_to_come_again(server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    # More completions than the queue takes are not to be tried again.
    most = server.get("/props", **key(ONE)).json["limits"]["connections"]
    answer = server.ask(COMPLETIONS, {**body, "n": most + 1}, **key(ONE))
    assert answer.status == 400 and answer.json["error"]["param"] == "n"
    with server.connect(post(COMPLETIONS, {**ENDLESS, "n": most}, f"x-api-key: {ONE}")):
        wait_until(lambda: server.requests("model", **key(ONE)) == (1, most - 1))
        for path, more in ((COMPLETIONS, body), ("/v1/embeddings", {"input": "x"})):
            answer = server.ask(path, more, **key(ONE))
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert answer.json["error"]["type"] == "rate_limit_error"
    wait_until(lambda: server.requests("model", **key(ONE)) == (0, 0))
    assert server.ask(COMPLETIONS, body, **key(ONE)).status == 200
    metrics = server.metrics(**key(ONE))
    assert metrics['mlx_specdec:requests_rejected_total{model_name="model"}'] == 2
    assert metrics['mlx_specdec:requests_cancelled_total{model_name="model"}'] == most


def test_nobody_hits_what_another_key_has_sent(server: Server) -> None:
    """Neither in memory nor on the disk, which has what the first server cached. All prompts begin
    with the same token."""
    assert [hits(server, CACHED, name) > 20 for name in (OTHER, ONE)] == [False, True]
    order = (ONE, OTHER, OTHER, ONE)
    prompt = "New text, which the first server has never seen. " * 2
    assert [hits(server, prompt, name) > 20 for name in order] == [False, False, True, True]
    # The lines of the log name neither keys nor prompts.
    assert not any(OTHER in line or "New text" in line for line in server.log)


def test_nobody_drafts_from_what_another_key_has_written(server: Server) -> None:
    def ask(name: str) -> tuple[str, int]:
        body = {"prompt": "def read_lines", "max_tokens": 40, "temperature": 0}
        answer: Any = server.ask(COMPLETIONS, body, **key(name)).json
        return answer["choices"][0]["text"], answer["timings"]["draft_n_accepted"]

    answers = [ask(name) for name in (ONE, ONE, OTHER, OTHER)]
    assert {text for text, _ in answers} == {answers[0][0]}
    first, again, other, others = (accepted for _, accepted in answers)
    assert other == first < again == others
    assert server.metrics(**key(ONE))['mlx_specdec:history_bytes{model_name="model"}'] > 0
