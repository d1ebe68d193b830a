"""Connections to the server that send nothing."""

import contextlib
import resource
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from .support import PATIENCE, checkpoint, served

PROGRAM = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@contextlib.contextmanager
def opening(count: int) -> Iterator[None]:
    """Let this process open some files, or skip the test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(count, before[0]), before[1]))
    except (ValueError, OSError):
        pytest.skip(f"this system does not let a process open {count} files")
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("files", "count"), [(256, 160), (4096, 1400)])
def test_silent_connections_beyond_a_bound_are_closed_without_a_traceback(
    model: Path, files: int, count: int
) -> None:
    with served("--model", model, program=PROGRAM.format(files=files)) as server:
        with opening(2000), contextlib.ExitStack() as stack:
            address = ("127.0.0.1", server.port)
            silent = [
                stack.enter_context(socket.create_connection(address, timeout=PATIENCE))
                for _ in range(count)
            ]
            with contextlib.suppress(ConnectionResetError):
                assert silent[-1].recv(1) == b""
            poll = select.poll()
            poll.register(silent[0], select.POLLIN)
            assert not poll.poll(0), "a connection within the bound was closed"
            # A request on a connection within the bound is answered.
            silent[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent[0].recv(100).startswith(b"HTTP/1.1 200 ")
        while server.get("/health").status != 200:
            pass
    lines = [line for line in server.log if " INFO " not in line]
    assert lines == []
