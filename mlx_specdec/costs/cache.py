"""Costs of rounds that earlier sequences measured, in the platform's cache directory.

One small file per machine and pair of models. A cache is a help and never a duty: what cannot be
read is as good as absent, and what cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

PLACE = "MLX_SPECDEC_CACHE"
"""Environment variable: a directory to use in place of the platform's."""
SHARE_OF_NEW = 0.5


@dataclass(frozen=True)
class CostKey:
    """What the costs of a round depend on. Models are told by name and bytes of their weights;
    sampled is whether noise is drawn."""

    device: str
    mlx: str
    blas: str
    target: str
    target_bytes: int
    draft: str
    draft_bytes: int
    dtype: str
    sampled: bool


def directory() -> Path:
    """Where the files lie; it need not exist."""
    if place := os.environ.get(PLACE):
        return Path(place)
    from platformdirs import user_cache_path

    return user_cache_path("mlx-specdec") / "costs"


def read(key: CostKey) -> dict[int, float]:
    """Costs by drafted length in plain steps; empty where there are none that can be used."""
    try:
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if content["key"] != asdict(key):
            return {}
        costs = {int(length): float(cost) for length, cost in content["costs"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return costs if all(n > 0 and 0 < cost < math.inf for n, cost in costs.items()) else {}


def merge(key: CostKey, costs: Mapping[int, float]) -> None:
    """Add what a text measured: halfway between it and what was known of the same length."""
    known = read(key)
    moved = {
        n: cost + (1 - SHARE_OF_NEW) * (known.get(n, cost) - cost) for n, cost in costs.items()
    }
    write(key, {**known, **moved} if moved else {})


def write(key: CostKey, costs: Mapping[int, float]) -> None:
    """Replace what is known, whole or not at all; a cost that is no positive number is left out.

    Where no cost is left, what is known stays.
    """
    kept = {str(n): costs[n] for n in sorted(costs) if 0 < costs[n] < math.inf}
    if not kept:
        return
    content = {"key": asdict(key), "costs": kept}
    file = _file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(content, stream, allow_nan=False)
            os.replace(name, file)
        except OSError:
            os.unlink(name)


def _file(key: CostKey) -> Path:
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=16).hexdigest()
    return directory() / f"{digest}.json"
