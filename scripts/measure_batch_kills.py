"""Kill a run over a file of prompts with SIGKILL at random moments, and finish it: the same bytes?

    python scripts/measure_batch_kills.py --lines 300 --kills 20 -- --temperature 0.7

What stands behind -- goes to `mlx-specdec batch`; without a model the shipped translator is run.
One line of JSON a kill, the last line sums up. Ends with 1 where a killed run did not end with the
bytes of one that was let alone, or left anything beside them.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "prompts" / "translation.jsonl"
POLLED_EVERY = 0.001


def prompts(file: Path, count: int) -> Path:
    """A file of the shipped prompts, again and again, each with a seed of its own."""
    shipped = SHIPPED.read_text(encoding="utf-8").splitlines()
    rows = [{**json.loads(shipped[at % len(shipped)]), "seed": at} for at in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def start(source: Path, output: Path, flags: list[str]) -> subprocess.Popen[bytes]:
    """A run, once its first result could be on the disk; before, a kill leaves nothing."""
    line = [sys.executable, "-m", "mlx_specdec", "batch", str(source), "--output", str(output)]
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([*line, *flags], cwd=ROOT, **silent)
    while process.poll() is None and not any(output.parent.iterdir()):
        time.sleep(POLLED_EVERY)
    return process


def run(source: Path, output: Path, flags: list[str]) -> tuple[bool, float]:
    """Whether a run that is let alone ends well, and the seconds of its decoding."""
    process = start(source, output, flags)
    begin = time.perf_counter()
    return process.wait() == 0, time.perf_counter() - begin


def kill(source: Path, output: Path, flags: list[str], moment: float) -> bool:
    """Start, and kill so many seconds into the decoding; whether it was still running then."""
    process = start(source, output, flags)
    try:
        process.wait(timeout=moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return process.returncode == -signal.SIGKILL


def kills(
    source: Path, output: Path, flags: list[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Each kill with what it left, and what the next run made of that."""
    well, whole = run(source, output, flags)
    if not well:
        sys.exit("the run fails even when it is let alone")
    wanted = output.read_bytes()
    draw = random.Random(seed)
    while count:
        output.unlink(missing_ok=True)
        moment = draw.uniform(0, whole)
        if not kill(source, output, flags, moment):
            # It was faster this time, and ended before: no kill. Later ones come earlier.
            whole = min(whole, moment)
            continue
        count -= 1
        partial = output.with_name(f"{output.name}.partial")
        left = partial.read_bytes() if partial.exists() else b""
        well, _ = run(source, output, flags)
        clean = [path.name for path in output.parent.iterdir()] == [output.name]
        yield {
            "killed_after": round(moment, 3),
            "of": round(whole, 3),
            "results_left": max(0, left.count(b"\n") - 1),
            "half_a_line_left": left[-1:] not in (b"", b"\n"),
            "same_bytes": well and clean and output.read_bytes() == wanted,
        }


def summary(results: list[Mapping[str, Any]]) -> dict[str, Any]:
    """How often what happened."""
    return {
        "kills": len(results),
        "left_results": sum(each["results_left"] > 0 for each in results),
        "same_bytes": sum(each["same_bytes"] for each in results),
    }


def main() -> None:
    """Read the command line, kill, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lines", type=int, default=300)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("flags", nargs="*", help="of mlx-specdec batch, behind --")
    asked = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(dir=asked.directory) as name:
        source = prompts(Path(name) / "prompts.jsonl", asked.lines)
        output = Path(name) / "results" / "texts.jsonl"
        output.parent.mkdir()
        for each in kills(source, output, asked.flags, asked.kills, asked.seed):
            print(json.dumps(each), flush=True)
            results.append(each)
    told = summary(results)
    print(json.dumps({"lines": asked.lines, **told}))
    if told["same_bytes"] < len(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
