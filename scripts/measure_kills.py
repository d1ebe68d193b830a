"""Kill conversions with SIGKILL at random moments: what is left on disk, and whether it goes again.

    python scripts/measure_kills.py --megabytes 100 --kills 20 --formats zip,old,safetensors

Makes a synthetic T5, converts it once to know how long the writing takes and what the result is,
and then starts, kills and starts again; seconds count from the first thing on the disk. One line of
JSON a kill; the last line sums up. Ends with 1 where a killed conversion left anything but a hidden
directory or the whole result, or where the next one failed or did not clean.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from killing import Victim
from measure_conversion import WRITERS, command, configuration, make, total

SMALL: dict[str, Any] = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_heads": 8}
"""t5-small's widths; t5-11b's do not fit into 100 MB."""
SECONDS = 600
"""After which a conversion counts as hanging."""


def small(nbytes: float) -> dict[str, Any]:
    """A T5 of at least this many bytes in float32, narrow."""
    config = {**configuration(0), **SMALL}
    # The embedding alone is 66 MB.
    config["vocab_size"] = 32128 if nbytes >= 1e8 else 4096
    while total(config) < nbytes:
        config["num_layers"] += 1
    return config


def contents(directory: Path) -> dict[str, str]:
    """A digest of each file."""
    return {
        file.name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
        for file in sorted(directory.iterdir())
    }


def left_in(parent: Path) -> dict[str, dict[str, int]]:
    """Everything beside the place of the result, and in it: files and bytes of each."""
    found = {}
    for path in sorted(parent.iterdir()):
        files = [file for file in path.rglob("*") if file.is_file()]
        found[path.name] = {"files": len(files), "bytes": sum(f.stat().st_size for f in files)}
    return found


def kills(
    source: Path, target: Path, options: list[str], count: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Each kill with what it left, and what the next start made of that."""
    target.parent.mkdir(parents=True)
    conversion = Victim(command(source, target, options), target.parent, SECONDS)
    well, seconds = conversion.run()
    if not well:
        sys.exit("the conversion fails even when it is let alone")
    wanted = contents(target)
    remove = functools.partial(shutil.rmtree, target, ignore_errors=True)
    for killed in conversion.kills(count, seconds, seed, remove):
        left = left_in(target.parent)
        # A kill after the last step finds a result, which has to be the whole one.
        finished = target.is_dir()
        sound = contents(target) == wanted if finished else True
        hidden = all(name.startswith(f".{target.name}.") for name in left.keys() - {target.name})
        remove()
        well, _ = conversion.run()
        clean = [path.name for path in target.parent.iterdir()] == [target.name]
        yield {
            **killed,
            "left": left,
            "finished": finished,
            "only_hidden_or_whole": hidden and sound,
            "again": well and clean and contents(target) == wanted,
        }


def summary(results: list[Mapping[str, Any]]) -> dict[str, Any]:
    """How often what happened."""
    return {
        "kills": len(results),
        "left_nothing": sum(not each["left"] for each in results),
        "left_hidden_work": sum(bool(each["left"]) and not each["finished"] for each in results),
        "finished_before": sum(each["finished"] for each in results),
        "could_be_taken_for_finished": sum(not e["only_hidden_or_whole"] for e in results),
        "succeeded_again": sum(each["again"] for each in results),
    }


def main() -> None:
    """Read the command line, kill, print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", default="safetensors", help=", ".join(WRITERS))
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--max-shard-size", default="30MB")
    asked = parser.parse_args()
    config = small(asked.megabytes * 1e6)
    if shutil.disk_usage(asked.directory).free < 4 * total(config):
        sys.exit(f"{asked.directory} has less than {4 * total(config)} bytes free")
    results = []
    for kind in asked.formats.split(","):
        with tempfile.TemporaryDirectory(dir=asked.directory) as name:
            source = make(Path(name), kind, config)
            target = Path(name) / "results" / "out"
            options = ["--max-shard-size", asked.max_shard_size]
            for each in kills(source, target, options, asked.kills, asked.seed):
                print(json.dumps({"format": kind, **each}), flush=True)
                results.append(each)
    found = summary(results)
    print(json.dumps({"bytes": total(config), **found}))
    if found["could_be_taken_for_finished"] or found["succeeded_again"] < len(results):
        sys.exit(1)


if __name__ == "__main__":
    main()
