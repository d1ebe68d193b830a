"""An error inside the server shows a client nothing of it."""

import pytest
from starlette.testclient import TestClient

from mlx_specdec.serve.registry import Registry

from ..support.serving import CHAT, user


def test_a_handler_that_fails_shows_no_path(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Registry, *about: object) -> None:
        raise ValueError("/a/path/of/ours")

    monkeypatch.setattr(Registry, "loaded", broken)
    with caplog.at_level("INFO", "mlx_specdec.serve.app"):
        answer = client.post(CHAT, json={"messages": [user("x")]})
    assert [f"path={CHAT} status=500" in line for line in caplog.messages] == [True]
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "something went wrong here"
