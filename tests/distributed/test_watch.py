"""The watch ends a process that waits in a sum that cannot be interrupted."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mlx_specdec.models.distributed import group
from mlx_specdec.models.distributed.group import Watch, connections


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a connection over a network."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        assert connections([server.fileno()]) == []
    with near, far:
        yield near, far


@pytest.mark.parametrize("reset", [False, True])
def test_a_connection_that_ends_is_lost(
    pair: tuple[socket.socket, socket.socket], reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = pair
    [ended] = connections([near.fileno()])
    if reset:
        far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    monkeypatch.setattr(group, "GRACE", 0.0)
    with ended:
        lost = threading.Event()
        Watch([ended], lost.set).start()
        assert lost.wait(10)
