"""ollama's API: embeddings of any texts, and a sentence for what only ollama does."""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from .support import Server, checkpoint, served

LONGEST = 64


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = checkpoint(tmp_path_factory.mktemp("model"))
    with served("--model", model, "--max-model-len", LONGEST) as running:
        yield running


def test_a_text_of_any_length_is_embedded(server: Server) -> None:
    answer = server.ok("/api/embed", input=["é" * 100_000, "é" * 1000, "é" * 100])
    first, second, third = answer["embeddings"]
    assert first == second == third
    assert answer["prompt_eval_count"] == 3 * LONGEST
    assert server.ok("/api/embeddings", prompt="é" * 100_000)["embedding"] == first


def test_an_empty_text_does_not_refuse_the_others(server: Server) -> None:
    texts = ["one", "", "two", " \n"]
    answer = server.ok("/api/embed", input=texts)
    one, empty, two, blank = answer["embeddings"]
    assert [one, two] == server.ok("/api/embed", input=["one", "two"])["embeddings"]
    assert empty == blank == [0.0] * len(one)
    assert math.isclose(sum(number**2 for number in one), 1, rel_tol=1e-4)
    assert server.ok("/api/embed", input=[""])["embeddings"] == [empty]


def refuses(server: Server, path: str, answer: str) -> None:
    words = "is not supported, because this server does not change its models: ask for "
    assert answer.startswith(f"/api/{path} {words}"), answer
    assert "start it with another --model NAME" in answer


@pytest.mark.parametrize("path", ["pull", "push", "create", "copy", "blobs/sha256:0"])
def test_what_changes_models_is_refused_in_a_sentence(server: Server, path: str) -> None:
    answer = server.ask(f"/api/{path}", {"model": "llama3"})
    assert (answer.status, list(answer.json)) == (400, ["error"])
    refuses(server, path, answer.json["error"])


def test_a_model_is_not_deleted(server: Server) -> None:
    url, body = f"http://127.0.0.1:{server.port}/api/delete", b'{"model": "llama3"}'
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(urllib.request.Request(url, body, method="DELETE"))
    with caught.value as error:
        assert error.code == 400
        refuses(server, "delete", json.load(error)["error"])
