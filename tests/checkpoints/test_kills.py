"""scripts/measure_kills.py: killed conversions leave nothing that looks finished, and go again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "zip"])
def test_killed_conversions_leave_only_hidden_work_and_start_again(
    tmp_path: Path, kind: str
) -> None:
    script = [sys.executable, ROOT / "scripts" / "measure_kills.py", "--directory", tmp_path]
    sizes = ["--megabytes", "25", "--max-shard-size", "8MB", "--kills", "2", "--seed", "3"]
    done = subprocess.run(
        [*script, *sizes, "--formats", kind],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *each, found = (json.loads(line) for line in done.stdout.splitlines())
    assert len(each) == found["kills"] == found["succeeded_again"] == 2
    assert found["could_be_taken_for_finished"] == 0
    for kill in each:
        assert (
            kill["left"]
            and kill["again"]
            and all(
                name == "out" if kill["finished"] else name.startswith(".out.")
                for name in kill["left"]
            )
        )
    assert list(tmp_path.iterdir()) == []
