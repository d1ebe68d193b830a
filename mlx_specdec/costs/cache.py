"""Costs of rounds that earlier sequences measured, in the platform's cache directory.

One small file per machine and pair of models. What cannot be read is as good as absent, and what
cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import user_cache

FAR_APART = 4.0
"""Of two costs of the same length: one of them is wrong."""


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
    """Add what a text measured; see `together`."""
    if costs:
        write(key, together(read(key), costs))


def together(known: Mapping[int, float], costs: Mapping[int, float]) -> dict[int, float]:
    """Halfway between what was known of a length and what was measured; what was measured, where
    that is no matter of noise."""
    result = dict(known)
    for n, cost in costs.items():
        before = known.get(n, cost)
        alike = before / FAR_APART < cost < before * FAR_APART
        result[n] = (before + cost) / 2 if alike else cost
    return result


def write(key: CostKey, costs: Mapping[int, float]) -> None:
    """Replace what is known, whole or not at all; a cost that is no positive number is left out.

    Where no cost is left, what is known stays.
    """
    kept = {str(n): costs[n] for n in sorted(costs) if 0 < costs[n] < math.inf}
    if not kept:
        return
    content = json.dumps({"key": asdict(key), "costs": kept}, allow_nan=False)
    with contextlib.suppress(OSError), user_cache.replacing(_file(key)) as stream:
        stream.write(content.encode())


def _file(key: CostKey) -> Path:
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=16).hexdigest()
    return user_cache.directory("costs") / f"{digest}.json"
