"""A thousand rounds leave no rank with more sockets or more memory than two hundred."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..support import loopback

pytestmark = pytest.mark.slow
EARLY, LATE = 200, 1000
"""Rounds."""
MAY_GROW = {"descriptors": 0, "arrays": 1 << 16, "resident": 4 << 20}
"""By how much in 800 rounds without a leak. arrays: bytes of two contexts, some of which may still
be on their way out; one that stayed with every text would be ten times as much. resident: 5 kB a
round, for the allocator."""


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
        assert held[-1]["rounds"] >= LATE
        early = [each for each in held if EARLY <= each["rounds"] < LATE / 2]
        late = [each for each in held if each["rounds"] > LATE * 3 / 4]
        for name, more in MAY_GROW.items():
            # What is open for a moment is no leak.
            first, last = (min(each[name] for each in some) for some in (early, late))
            print(f"rank {rank}, {name}: {first}, then {last}")
            assert last <= first + more, (rank, name)
