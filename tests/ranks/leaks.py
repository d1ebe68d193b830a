"""Run by every rank of a test: the same text again and again, and what the process holds meanwhile.

    python -m tests.ranks.leaks SPEC.json

Every rank writes what it has held whenever a text began to a file beside the specification.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_specdec import Options, load, stream_generate
from mlx_specdec.models.distributed.group import open_descriptors
from mlx_specdec.models.distributed.orders import Channel, Message, Op


class Held:
    """rounds: passes until now, those over prompts included. at: what was held, text by text."""

    def __init__(self) -> None:
        self.rounds = 0
        self.at: list[dict[str, int]] = []
        for name in ("send", "receive"):
            self._watch(name)

    def _watch(self, name: str) -> None:
        plain = getattr(Channel, name)

        def noted(channel: Channel, *args: Any) -> Message:
            message: Message = plain(channel, *args)
            ops = [order.op for order in message.orders]
            if Op.OPEN in ops:
                self.at.append(self._now())
            self.rounds += ops.count(Op.ADVANCE)
            return message

        setattr(Channel, name, noted)

    def _now(self) -> dict[str, int]:
        resident = subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])
        return {
            "rounds": self.rounds,
            "descriptors": len(open_descriptors()),
            "arrays": mx.get_active_memory(),
            "resident": 1024 * int(resident),
        }


def main(file: Path) -> None:
    held, spec = Held(), json.loads(file.read_text())
    try:
        pair = load(spec["target"], spec["draft"], distributed="tensor")
        options = Options(cost_cache=False, max_tokens=spec["length"], proposer="draft")
        while not held.at or held.at[-1]["rounds"] < spec["rounds"]:
            stream_generate(pair, spec["prompt"], options).result()
    finally:
        file.with_name(f"rank-{os.environ['MLX_RANK']}.json").write_text(json.dumps(held.at))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
