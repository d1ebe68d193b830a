"""A server with keys: what one of them has stored is not found with another one."""

import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from .support import Server, checkpoint, served
from .zoo import COMPLETIONS, RESPONSES

KEYS = ("one", "two")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys, on a machine without the extra grammar."""
    root = tmp_path_factory.mktemp("keys")
    (root / "llguidance.py").write_text("raise ImportError('it is not installed')")
    flags = [flag for key in KEYS for flag in ("--api-key", key)]
    with served("--model", checkpoint(root / "tiny"), *flags, PYTHONPATH=str(root)) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def delete(server: Server, path: str, key: str) -> int:
    url = f"http://127.0.0.1:{server.port}{path}"
    request = urllib.request.Request(url, method="DELETE", headers=bearer(key))
    try:
        with urllib.request.urlopen(request) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_response_of_another_key_is_not_found(server: Server) -> None:
    body = {"input": "One", "max_output_tokens": 2}
    id = server.ask(RESPONSES, body, **bearer("one")).json["id"]
    for key, status in (("two", 404), ("one", 200)):
        found = server.ask(f"{RESPONSES}/{id}", **bearer(key)).status
        continued = server.ask(RESPONSES, {**body, "previous_response_id": id}, **bearer(key))
        assert {found, continued.status, delete(server, f"{RESPONSES}/{id}", key)} == {status}
    assert delete(server, f"{RESPONSES}/{id}", "one") == 404


def test_the_extra_that_is_missing_is_named(server: Server) -> None:
    schema = {"type": "json_schema", "schema": {"type": "integer"}}
    body = {"prompt": "x", "response_format": schema}
    answer = server.ask(COMPLETIONS, body, **bearer("one"))
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, "response_format")
    assert "pip install" in error["message"] and "grammar" in error["message"]
