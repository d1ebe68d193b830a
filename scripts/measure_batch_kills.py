"""Kill a run over a file of prompts with SIGKILL at random moments, and finish it: the same bytes?

    python scripts/measure_batch_kills.py --lines 300 --kills 20 -- --temperature 0.7

What stands behind -- goes to `mlx-specdec batch`; without a model the shipped translator is run.
One line of JSON a kill, the last line sums up. Ends with 1 where a killed run did not end with the
bytes of one that was let alone, or left anything beside them.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from killing import Victim

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "prompts" / "translation.jsonl"


def prompts(file: Path, count: int) -> Path:
    """A file of the shipped prompts, again and again, each with a seed of its own."""
    shipped = SHIPPED.read_text(encoding="utf-8").splitlines()
    rows = [{**json.loads(shipped[at % len(shipped)]), "seed": at} for at in range(count)]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return file


def kills(
    source: Path, output: Path, flags: list[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Each kill with what it left, and what the next run made of that."""
    line = [sys.executable, "-m", "mlx_specdec", "batch", str(source), "--output", str(output)]
    batch = Victim([*line, *flags], output.parent)
    well, seconds = batch.run()
    if not well:
        sys.exit("the run fails even when it is let alone")
    wanted = output.read_bytes()
    remove = functools.partial(output.unlink, missing_ok=True)
    for killed in batch.kills(count, seconds, seed, remove):
        partial = output.with_name(f"{output.name}.partial")
        left = partial.read_bytes() if partial.exists() else b""
        well, _ = batch.run()
        clean = [path.name for path in output.parent.iterdir()] == [output.name]
        yield {
            **killed,
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
