"""The store of responses, and streams of responses without text."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from mlx_specdec.serve import service
from mlx_specdec.serve.problems import Problem
from mlx_specdec.serve.responses import Item
from mlx_specdec.serve.stored import StoredConversation, StoredResponses

from ..support.serving import broken_after, client_of, running
from ..support.tooled import make_tooled

PATH = "/v1/responses"
ASKED: dict[str, Any] = {"max_output_tokens": 8, "stream": True}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with running((make_tooled(tmp_path_factory.mktemp("tooled")), None)) as engine:
        yield client_of(engine)


def test_stored_responses_stay_within_their_bound() -> None:
    stored = StoredResponses(most_bytes=4000)
    given = [Item(role="user", content="x" * 1000)]
    for number in range(10):
        stored.put("a", StoredConversation({"id": str(number)}, given, 1000))
        assert stored.nbytes <= 4000
    before = stored.get("a", "9")
    for number in range(6):
        with pytest.raises(Problem):
            stored.get("a", str(number))
    with pytest.raises(Problem):
        stored.get("b", "9")  # of another tenant
    # All that a long conversation has counts.
    items = [*before.items, *given]
    stored.put("a", StoredConversation({"id": "next"}, items, before.nbytes + 1000))
    assert [*stored.get("a", "next").items] == given * 2 and stored.nbytes <= 4000
    stored.put("a", StoredConversation({"id": "too large"}, given, 5000))
    assert stored.nbytes == 0


def test_silence_and_failures_are_events(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HEARTBEAT_SECONDS", 1e-5)
    body = {**ASKED, "input": [{"role": "user", "content": "Who? " * 60}]}
    text = client.post(PATH, json=body).text
    assert text.count("event: response.in_progress\n") > 1 and "keep-alive" not in text
    ping = {"messages": body["input"], "max_tokens": 8, "stream": True}
    assert 'event: ping\ndata: {"type": "ping"}' in client.post("/v1/messages", json=ping).text
    monkeypatch.undo()
    with broken_after(3, monkeypatch):
        *_, block, end = client.post(PATH, json=body).text.split("\n\n")
    name, data = block.split("\n")
    response = json.loads(data.removeprefix("data: "))["response"]
    assert (end, name) == ("", "event: response.failed")
    assert response["status"] == "failed" and "/a/path" not in json.dumps(response)
    assert response["error"]["code"] == "server_error" and response["error"]["message"]
