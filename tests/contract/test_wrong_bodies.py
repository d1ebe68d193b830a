"""Bodies with many wrong entries cost the server little, and others are answered meanwhile."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .support import Server, checkpoint, served

ENTRIES = 1 << 19
"""Entries of a wrong list: a body of about a megabyte."""
GROWTH = 300 << 10
"""Bound of the growth of the server's largest memory in KiB. One error for each entry of one list
took three times as much."""
TEXT = {"role": "user", "content": "hi"}
ZEROS = [0] * ENTRIES
WRONG: dict[str, list[Any]] = {
    "/v1/chat/completions": [
        {"messages": ZEROS},
        {"messages": [{"role": "user", "content": ZEROS}]},
        {"messages": [TEXT, {"role": "assistant", "tool_calls": ZEROS}]},
        {"messages": [TEXT], "tools": ZEROS},
        {"messages": [TEXT], "logit_bias": {f"x{at}": 0 for at in range(ENTRIES // 8)}},
    ],
    "/v1/completions": [{"prompt": [{}] * (ENTRIES // 2)}, {"prompt": [[""] * ENTRIES]}],
    "/v1/responses": [
        {"input": ZEROS},
        {"input": [{"type": "message", "role": "user", "content": ZEROS}]},
        {"input": "hi", "include": ZEROS},
    ],
    "/v1/messages": [
        {"max_tokens": 1, "messages": ZEROS},
        {"max_tokens": 1, "messages": [{"role": "user", "content": ZEROS}]},
        {"max_tokens": 1, "messages": [TEXT], "system": ZEROS},
    ],
    "/api/chat": [{"messages": ZEROS}],
    "/api/embed": [{"input": ZEROS}],
    "/v1/embeddings": [{"input": ["", *ZEROS]}],
    "/generate": [{"inputs": "hi", "parameters": {"stop": ZEROS}}],
    "/infill": [{"input_prefix": "a", "input_extra": ZEROS}],
    "/detokenize": [{"tokens": [""] * (ENTRIES // 2)}],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served("--model", checkpoint(tmp_path_factory.mktemp("model"))) as running:
        yield running


def largest_memory(server: Server) -> int:
    """Return the largest number of KiB that the server's process has had in memory."""
    status = Path(f"/proc/{server.process.pid}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    assert found is not None, status
    return int(found[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux reports the memory")
@pytest.mark.parametrize("path", WRONG)
def test_a_list_of_wrong_entries_takes_little_memory(server: Server, path: str) -> None:
    before = largest_memory(server)
    for body in WRONG[path]:
        with ThreadPoolExecutor(1) as others:
            answer = others.submit(server.ask, path, body)
            while not answer.done():
                assert server.get("/health").status == 200
        assert answer.result().status in (400, 422), answer.result()
        assert largest_memory(server) - before < GROWTH
