"""What earlier texts taught of acceptance, in the platform's cache directory.

One small file per pair, proposer, rule and range of temperatures. What cannot be read is as good as
absent, and what cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from .. import user_cache
from .online import Verdicts

KEPT_SHARE = 0.8
"""Of what is known, beside each new text: about the last five count."""
MOST = 1e6


@dataclass(frozen=True)
class TextKey:
    """What acceptance depends on. temperature: number of a range."""

    target: str
    target_bytes: int
    draft: str
    draft_bytes: int
    dtype: str
    temperature: int
    rule: str


@dataclass(frozen=True)
class Experience:
    """verdicts: by position. saved: of the budgets for trials, in plain steps; less than
    0 where more was spent."""

    verdicts: Verdicts
    saved: float


def read(key: TextKey) -> Experience | None:
    """What is known; None where that is nothing that can be used."""
    try:
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if content["key"] != asdict(key):
            return None
        reached, passed = (tuple(map(float, content[name])) for name in ("reached", "passed"))
        saved = float(content["saved"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    sound = all(0 <= less <= more <= MOST for more, less in zip(reached, passed, strict=False))
    if len(reached) != len(passed) or not sound or not math.isfinite(saved):
        return None
    return Experience((reached, passed), saved)


def merge(key: TextKey, verdicts: Verdicts, saved: float) -> None:
    """Add what a text taught; older texts weigh less. Whole or not at all."""
    earlier = read(key)
    reached, passed = map(list, verdicts)
    if earlier is not None:
        for own, its in zip((reached, passed), earlier.verdicts, strict=True):
            for index, count in enumerate(its[: len(own)]):
                own[index] += KEPT_SHARE * count
    content = {"key": asdict(key), "reached": reached, "passed": passed, "saved": saved}
    with contextlib.suppress(OSError), user_cache.replacing(_file(key)) as stream:
        stream.write(json.dumps(content, allow_nan=False).encode())


def _file(key: TextKey) -> Path:
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=16).hexdigest()
    return user_cache.directory("experience") / f"{digest}.json"
