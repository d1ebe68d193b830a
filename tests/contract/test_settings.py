"""Settings as clients write them: numbers as texts, and empty texts for what is not set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Server, checkpoint, command, served

TEXT: dict[str, Any] = {"prompt": "x", "seed": 5, "max_tokens": 6}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with served("--model", model) as running:
        yield running


def text_of(server: Server, **body: Any) -> str:
    return str(server.ok("/v1/completions", **{**TEXT, **body})["choices"][0]["text"])


def test_numbers_may_be_texts(server: Server) -> None:
    numbers = {"temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 2**62 + 1, "max_tokens": 9}
    words = {name: str(number) for name, number in numbers.items()}
    assert text_of(server, **words) == text_of(server, **numbers)
    assert text_of(server, n="1", top_p="1", presence_penalty="-.5", max_tokens="6.0")
    options = {"num_predict": "3", "temperature": "0", "repeat_penalty": "1.1"}
    answer = server.ok("/api/generate", prompt="x", options=options, stream=False)
    assert answer["eval_count"] <= 3
    parameters = {"max_new_tokens": "3", "temperature": "0.5", "seed": 3}
    assert server.ok("/generate", inputs="x", parameters=parameters)["generated_text"]
    for name, wrong in (("temperature", "hot"), ("top_p", "1.5"), ("max_tokens", "1.5")):
        refused = server.ask("/v1/completions", {**TEXT, name: wrong})
        assert (refused.status, refused.json["error"]["param"]) == (400, name)


def test_min_p_of_1_keeps_the_likeliest_token(server: Server, model: Path) -> None:
    for seed in (1, 2):
        assert text_of(server, temperature=1.5, min_p=1, seed=seed) == text_of(server)
    options = {"num_predict": 6, "temperature": 1.5}
    body = {"prompt": "x", "stream": False}
    sampled = server.ok("/api/generate", **body, options={**options, "min_p": 1})
    greedy = server.ok("/api/generate", **body, options={**options, "temperature": 0})
    assert sampled["response"] == greedy["response"]
    flags = ("--model", model, "--temperature", 1, "--max-tokens", 2)
    assert command("generate", *flags, "--min-p", 1, "x").code == 0
    command("generate", *flags, "--min-p", 1.1, "x").refuses("min")


@pytest.mark.parametrize("name", ["regex", "grammar", "guided_json", "guided_grammar"])
def test_an_empty_constraint_is_none(server: Server, name: str) -> None:
    assert text_of(server, **{name: ""}) == text_of(server)
