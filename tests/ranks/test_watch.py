"""The process that gives up for one that waits where nothing can interrupt it."""

from __future__ import annotations

import subprocess
import sys
import time

WAITS = (
    "import sys, time; from mlx_specdec.ranks.watch import give_up_after; "
    "give_up_after({seconds}, 'error: nobody came'); print('.', flush=True); time.sleep(60)"
)


def start(seconds: float) -> subprocess.Popen[str]:
    """A process that waits, and gives up after some seconds; returns once it has begun to."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(seconds=seconds)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.read(1) == "."
    return process


def test_whoever_waits_too_long_is_ended_with_the_sentence() -> None:
    process = start(1)
    assert process.communicate(timeout=30)[1] == "error: nobody came\n"
    assert process.returncode == -9


def test_nothing_holds_standard_error_open_once_the_process_is_killed() -> None:
    process = start(30)
    process.kill()
    begun = time.monotonic()
    assert process.communicate(timeout=60)[1] == ""
    assert time.monotonic() - begun < 15
