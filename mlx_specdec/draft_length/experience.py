"""What earlier texts taught of acceptance, in the platform's cache directory.

One small file per pair, proposer, rule and range of temperatures. What cannot be read is as good as
absent, and what cannot be written is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path

from .. import process as user_cache
from .acceptance import Verdicts

ROUNDS_KEPT = 200.0
"""How many rounds count, the last ones most."""
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
    0 where more was spent. reading: of a prompt for its first draft, in plain steps."""

    verdicts: Verdicts
    saved: float
    reading: float = 0.0


def read(key: TextKey) -> Experience | None:
    """What is known; None where that is nothing that can be used."""
    try:
        content = json.loads(_file(key).read_text(encoding="utf-8"))
        if content["key"] != asdict(key):
            return None
        reached, passed = (tuple(map(float, content[name])) for name in ("reached", "passed"))
        saved, reading = float(content["saved"]), float(content["reading"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    sound = all(0 <= less <= more <= MOST for more, less in zip(reached, passed, strict=False))
    sound &= math.isfinite(saved) and 0 <= reading < math.inf
    if len(reached) != len(passed) or not sound:
        return None
    return Experience((reached, passed), saved, reading)


def merge(key: TextKey, learned: Experience) -> None:
    """Add what a text taught; older texts weigh less. Whole or not at all."""
    earlier = read(key)
    known = learned if earlier is None else together(earlier, learned)
    reached, passed = known.verdicts
    content = {
        "key": asdict(key),
        "reached": reached,
        "passed": passed,
        "saved": known.saved,
        "reading": known.reading,
    }
    with contextlib.suppress(OSError), user_cache.replacing(_file(key)) as stream:
        stream.write(json.dumps(content, allow_nan=False).encode())


def together(earlier: Experience, learned: Experience) -> Experience:
    """Verdicts of both, where the earlier ones count for the less the more have come since."""
    rounds = learned.verdicts[0][0] if learned.verdicts[0] else 0.0
    share = math.exp(-rounds / ROUNDS_KEPT)
    reached, passed = (
        tuple(own + share * before for own, before in zip_longest(new, old, fillvalue=0.0))
        for new, old in zip(learned.verdicts, earlier.verdicts, strict=True)
    )
    return replace(learned, verdicts=(reached, passed))


def _file(key: TextKey) -> Path:
    digest = hashlib.blake2b(json.dumps(asdict(key)).encode(), digest_size=16).hexdigest()
    return user_cache.directory("experience") / f"{digest}.json"
