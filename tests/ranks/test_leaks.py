"""A thousand rounds leave no rank with more sockets or more memory than two hundred."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from . import loopback

pytestmark = pytest.mark.slow
EARLY, LATE = 200, 1000
"""Rounds."""
ALLOCATOR = 4 << 20
"""Bytes by which a process may grow in 800 rounds without a leak: 5 kB a round."""

CONTEXTS = 1 << 16
"""Bytes of two contexts, some of which may still be on their way out; a leak of one with every text
would be ten times as much."""


def test_a_thousand_rounds_leak_neither_sockets_nor_memory_on_any_rank(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 1, "eos_token_id": 999}
    spec = {
        "target": str(loopback.write("llama", tmp_path / "target", **changes)),
        "draft": str(loopback.write("llama", tmp_path / "draft", noise=0.1, **changes)),
        "prompt": loopback.PROMPT,
        "length": 40,
        "rounds": LATE,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    ended = loopback.run(tmp_path, 2, "-m", "tests.ranks.leaks", str(tmp_path / "spec.json"))
    assert [each.code for each in ended] == [0, 0], ended
    for rank in range(2):
        held = json.loads((tmp_path / f"rank-{rank}.json").read_text())
        early = next(each for each in held if each["rounds"] >= EARLY)
        late = held[-1]
        print(f"rank {rank}: {early} {late}")
        assert early["rounds"] < LATE / 2 and late["rounds"] >= LATE
        assert late["descriptors"] == early["descriptors"], rank
        assert late["arrays"] < early["arrays"] + CONTEXTS, rank
        assert late["resident"] < early["resident"] + ALLOCATOR, rank
