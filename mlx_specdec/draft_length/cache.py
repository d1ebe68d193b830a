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

from .. import process as user_cache
from .learned import EARLIER_COST_WEIGHT, Known, Learned, weighed
from .speedup import between

UNLIKE = 2.5
"""Of two costs of the same length, the newer one of one round: more is no noise. The more rounds
stand behind it, the less noise it has."""
STEPS_KEPT = 8.0
"""Plain steps whose seconds count: a machine's speed drifts."""
FAR_APART = 4.0
"""Of two costs of the same length: one of them is wrong."""


@dataclass(frozen=True)
class CostKey:
    """What the costs of a round depend on. Models are told by name and bytes of their weights;
    sampled is whether noise is drawn; rows are sequences of a batch."""

    device: str
    mlx: str
    blas: str
    target: str
    target_bytes: int
    draft: str
    draft_bytes: int
    dtype: str
    sampled: bool
    rows: int = 1


def read(key: CostKey) -> dict[int, Learned]:
    """Costs by drafted length, and the seconds of a plain step as that of 0; empty where there are
    none that can be used."""
    try:
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if content["key"] != asdict(key):
            return {}
        costs = {
            int(length): Learned(float(cost), float(rounds))
            for length, (cost, rounds) in content["costs"].items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
    return costs if all(n >= 0 and _is_sound(each) for n, each in costs.items()) else {}


def merge(key: CostKey, learned: Mapping[int, Learned]) -> None:
    """Add what a text measured; see `together`."""
    if learned:
        write(key, together(read(key), learned))


def together(known: Mapping[int, Learned], learned: Mapping[int, Learned]) -> dict[int, Learned]:
    """Means over the rounds behind both. Of costs that are too unlike for noise the older one
    counts no more than the newer one, and not at all where one of them must be wrong; those of
    other lengths are then as wrong. What new costs of other lengths refute is forgotten."""
    result, moved, wrong = dict(known), {}, False
    for n, new in learned.items():
        old = known.get(n, Learned(new.cost, 0.0))
        apart = max(old.cost / new.cost, new.cost / old.cost)
        unlike = apart > UNLIKE ** (1 / math.sqrt(max(1.0, new.rounds)))
        weight = min(old.rounds, new.rounds) if unlike else old.rounds
        weight = 0.0 if apart > FAR_APART else weight
        rounds = weight + new.rounds
        cost = (weight * old.cost + new.rounds * new.cost) / rounds
        result[n] = Learned(cost, min(rounds, EARLIER_COST_WEIGHT if n else STEPS_KEPT))
        if n and n in known:
            moved[n] = Learned(math.log(cost / old.cost), new.rounds)
            wrong |= unlike
    if wrong:
        result |= _moved_along({n: each for n, each in known.items() if n not in learned}, moved)
    return {n: each for n, each in result.items() if n in learned or not _refuted(n, each, learned)}


def _moved_along(others: Mapping[int, Learned], moved: Mapping[int, Learned]) -> dict[int, Learned]:
    """Costs that nobody has measured again, where others were wrong: a plain step that was measured
    wrongly is in all of them. moved: how those others have changed, as logarithms."""
    rounds = sum(each.rounds for each in moved.values())
    by = math.exp(sum(each.rounds * each.cost for each in moved.values()) / rounds)
    return {n: Learned(by * each.cost, min(rounds, each.rounds)) for n, each in others.items() if n}


def _refuted(length: int, known: Learned, learned: Mapping[int, Learned]) -> bool:
    """Whether a longer draft turned out far cheaper, or a shorter one far dearer."""
    return length > 0 and any(
        known.cost > FAR_APART * new.cost if length < n else FAR_APART * known.cost < new.cost
        for n, new in learned.items()
        if n
    )


def beside(known: Mapping[int, Mapping[int, Learned]], rows: int) -> dict[int, Learned]:
    """What rounds of `rows` sequences may cost, from what those of other powers of two did: on
    straight lines between the nearest ones. Such a guess counts for one round."""
    guessed: dict[int, Learned] = {}
    for length in sorted({n for costs in known.values() for n in costs if n}):
        points = {
            size.bit_length(): costs[length].cost
            for size, costs in known.items()
            if length in costs
        }
        place = min(max(rows.bit_length(), min(points)), max(points))
        guessed[length] = Learned(between(points, place), 1.0)
    return guessed


def write(key: CostKey, costs: Known) -> None:
    """Replace what is known, whole or not at all; a cost that is no positive number is left out.

    Where no cost is left, what is known stays.
    """
    kept = {str(n): each for n, each in sorted(weighed(costs).items()) if _is_sound(each)}
    if not kept:
        return
    content = json.dumps({"key": asdict(key), "costs": kept}, allow_nan=False)
    with contextlib.suppress(OSError), user_cache.replacing(_file(key)) as stream:
        stream.write(content.encode())


def _is_sound(each: Learned) -> bool:
    return 0 < each.cost < math.inf and 0 < each.rounds < math.inf


def directory() -> Path:
    """Where costs are kept."""
    return user_cache.directory("costs")


def _file(key: CostKey) -> Path:
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=16).hexdigest()
    return directory() / f"{digest}.json"
