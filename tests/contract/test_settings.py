"""Settings as clients write them: numbers as texts, and empty texts for what is not set."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .support import Server, checkpoint, served

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
