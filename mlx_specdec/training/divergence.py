"""How far a draft's distribution is from its target's, row by row.

Source: DistillSpec (Zhou et al., arXiv 2310.08461, sections 3 and 4).
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

_FLOOR = -80.0
"""Smallest log-probability told apart: less is no number in float32 once it is a probability."""


def log_probabilities(logits: mx.array) -> mx.array:
    """(..., vocabulary) logits of any type -> float32 log-probabilities at temperature 1."""
    wide = logits.astype(mx.float32)
    return mx.maximum(wide - mx.logsumexp(wide, axis=-1, keepdims=True), _FLOOR)


def forward(target: mx.array, draft: mx.array) -> mx.array:
    """KL(target || draft): the draft covers whatever the target may say."""
    return (mx.exp(target) * (target - draft)).sum(axis=-1)


def reverse(target: mx.array, draft: mx.array) -> mx.array:
    """KL(draft || target): the draft says nothing that the target would not."""
    return forward(draft, target)


def jensen_shannon(target: mx.array, draft: mx.array) -> mx.array:
    """The mean of both distributions' KL to the distribution between them."""
    middle = mx.logaddexp(target, draft) - mx.log(mx.array(2.0))
    return (forward(target, middle) + forward(draft, middle)) / 2


def total_variation(target: mx.array, draft: mx.array) -> mx.array:
    """Half of sum |p - q|: the share that speculative sampling rejects."""
    return mx.abs(mx.exp(target) - mx.exp(draft)).sum(axis=-1) / 2


DIVERGENCES: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "forward": forward,
    "reverse": reverse,
    "jsd": jensen_shannon,
    "tvd": total_variation,
}
"""By the names of DistillConfig; each takes (rows, vocabulary) log p, gives (rows,)."""
