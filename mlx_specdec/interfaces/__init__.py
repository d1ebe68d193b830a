"""The three interfaces that carry everything, and the frozen results that pass between them.

Models, drafting, verification and decoding all import this package and never one another.

A batch is several sequences that go through one pass together. Arrays carry a leading batch axis;
what differs from sequence to sequence and is known on the host comes as one entry per sequence.
A single sequence is a batch of one.
"""

from __future__ import annotations

from collections.abc import Callable

from .drafting import Noise, NoiseSource, Prices, Proposer, Rule
from .models import Context, Model, TargetModel, feed
from .results import (
    FINAL,
    NO_TOKEN,
    Proposal,
    Scores,
    Verdict,
    after,
    keys_of,
    no_proposal,
    rectangle,
    values_of,
)

__all__ = [
    "FINAL",
    "NO_TOKEN",
    "Context",
    "Model",
    "Noise",
    "NoiseSource",
    "Prices",
    "Progress",
    "Proposal",
    "Proposer",
    "Rule",
    "Scores",
    "TargetModel",
    "Verdict",
    "after",
    "feed",
    "ignore_progress",
    "keys_of",
    "no_proposal",
    "rectangle",
    "values_of",
]

Progress = Callable[[int, int], None]
"""Called with (done, total) units of long work, first with done = 0 and last with done = total."""


def ignore_progress(done: int, total: int) -> None:
    """A Progress that tells nobody."""
