"""Tokens that are drawn one after the other, each from what the ones before it led to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..contracts import Noise, Proposal
from ..sampling.choices import choose
from ..sampling.distribution import Distribution, log_probabilities_of


def draw(
    distributions: Sequence[Distribution],
    committed: Sequence[Sequence[int]],
    noise: Noise,
    count: int,
    logits: mx.array,
    following: Callable[[mx.array], mx.array],
) -> Proposal:
    """`count` tokens, at least 1, for every sequence: greedy at temperature 0, else drawn with the
    round's draft noise. Submitted as they are drawn, and not waited for.

    distributions: of the sequences, since p and q must be filtered alike. logits: (batch, 1,
    vocabulary) of the first token. following: those of the next one, behind the newest, (batch, 1)
    int32.
    """
    drafted: list[mx.array] = []
    rows: list[mx.array] = []
    for index in range(count):
        before = mx.concatenate(drafted, axis=1) if drafted else None
        rows.append(log_probabilities_of(distributions, logits, committed, before))
        drafted.append(choose(rows[-1], noise.draft(index)))
        mx.async_eval(drafted[-1])
        if index + 1 < count:
            logits = following(drafted[-1])
    sampled = any(each.samples for each in distributions)
    return Proposal(
        mx.concatenate(drafted, axis=1), mx.concatenate(rows, axis=1) if sampled else None
    )
