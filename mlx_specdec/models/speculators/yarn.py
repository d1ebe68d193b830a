"""YaRN: positions of texts longer than those that were learned from, as transformers turns them.

mlx-lm's takes neither `attention_factor` nor `truncate`, which gpt-oss has.
Source: Peng et al., arXiv 2309.00071, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...checkpoints.speculators.sizes import LayerSizes

FAST, SLOW = 32, 1
"""Turns within the texts that were learned from: a pair that makes more of them goes on as it did,
one that makes fewer slows down by the whole factor."""


def yarn(sizes: LayerSizes, told: Mapping[str, Any]) -> Callable[..., mx.array]:
    """The rotation of (batch, heads, m, head_dim), called with `offset`. told: of the positions, as
    config.json has it."""
    periods = mx.array(_periods(sizes, told), dtype=mx.float32)
    size = _size(told)

    def turned(heads: mx.array, offset: int | mx.array = 0) -> mx.array:
        return mx.fast.rope(
            heads if size == 1 else heads * size,
            sizes.head_dim,
            traditional=sizes.interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=periods,
        )

    return turned


def _periods(sizes: LayerSizes, told: Mapping[str, Any]) -> np.ndarray:
    """Of each pair, in positions and turns of 1 radian."""
    learned = told.get("original_max_position_embeddings") or sizes.max_positions
    pairs = sizes.head_dim // 2

    def pair(turns: float) -> float:
        """That makes so many turns in a text, which need not be a whole number."""
        return pairs * math.log(learned / (turns * 2 * math.pi)) / math.log(sizes.rope_theta)

    low, high = pair(told.get("beta_fast") or FAST), pair(told.get("beta_slow") or SLOW)
    if told.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, sizes.head_dim - 1)
    slowed = np.clip((np.arange(pairs) - low) / (high - low or 0.001), 0, 1)
    plain = sizes.rope_theta ** (np.arange(pairs) / pairs)
    return 1 / (slowed / (told["factor"] * plain) + (1 - slowed) / plain)


def _size(told: Mapping[str, Any]) -> float:
    """What queries and keys are multiplied by."""
    if (asked := told.get("attention_factor")) is not None:
        return float(asked)

    def grown(share: float) -> float:
        return 1.0 if told["factor"] <= 1 else 0.1 * share * math.log(told["factor"]) + 1

    both = told.get("mscale"), told.get("mscale_all_dim")
    return grown(both[0]) / grown(both[1]) if both[0] and both[1] else grown(1)
