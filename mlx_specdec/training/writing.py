"""Prompts -> the texts that a model writes after them, several texts in one pass.

Knows a loaded model and its law. Knows nothing of files and of what is learned from the texts.
Texts begin side by side; one whose prompt is longer is fed the rest of it while others are written
already. So there is no padding before a text, and every kind of cache will do.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ..assemble import Pair
from ..models.base import BatchPass
from ..sampling.distribution import choose, log_probabilities
from ..sampling.noise import CoupledNoise
from ..sampling.settings import Sampling

PASS = 512
"""Most prompt tokens, of all texts together, in one pass."""


@dataclass(frozen=True)
class Order:
    """One text to write. prompt: token ids. room: most tokens of the text. seed: of its noise."""

    prompt: tuple[int, ...]
    room: int
    seed: int


def batches(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Numbers of the prompts, `size` together whose lengths are close; the batches shuffled, so
    that the last ones are no longer than others."""
    order = sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    found = [sorted(order[start : start + size]) for start in range(0, len(order), size)]
    random.Random(seed).shuffle(found)
    return found


def write(pair: Pair, orders: Sequence[Order], temperature: float) -> list[tuple[int, ...]]:
    """The texts, each as plain decoding writes it with its seed, an end-of-text token included.

    Raises PromptError for a prompt that the model does not take.
    """
    model = pair.target
    prefixes = [model.prefix(order.prompt) for order in orders]
    sampling = Sampling(temperature=temperature)
    noises = [CoupledNoise(order.seed, pair.vocabulary, order.prompt) for order in orders]
    texts: list[list[int]] = [[] for _ in orders]
    advance = model.open_batch([order.prompt for order in orders])
    length = min(len(prefix) for prefix in prefixes)
    fed = _prefill(advance, [prefix[:length] for prefix in prefixes])
    while True:
        logits = advance(fed)[:, -1]
        gumbel = None
        if temperature > 0:
            places = [max(0, length - len(prefix)) for prefix in prefixes]
            rounds = (n.at(0, place) for n, place in zip(noises, places, strict=True))
            gumbel = mx.concatenate([each.target(1)[:, 0] for each in rounds])
        log_p = log_probabilities(logits, sampling, pair.vocabulary)
        chosen: list[int] = choose(log_p, gumbel).tolist()  # type: ignore[assignment]
        for row, (prefix, order, text) in enumerate(zip(prefixes, orders, texts, strict=True)):
            if length < len(prefix):
                chosen[row] = prefix[length]
            elif not _ended(text, order, pair):
                text.append(chosen[row])
        if all(_ended(text, order, pair) for text, order in zip(texts, orders, strict=True)):
            return [tuple(text) for text in texts]
        fed = mx.array(chosen, dtype=mx.int32)[:, None]
        length += 1


def _prefill(advance: BatchPass, prefixes: list[list[int]]) -> mx.array:
    """All but the last token of prefixes of one length are seen; returns the last, (batch, 1)."""
    tokens = mx.array(prefixes, dtype=mx.int32)
    last, step = tokens.shape[1] - 1, max(1, PASS // len(prefixes))
    for start in range(0, last, step):
        # Its logits are not read, and so not computed.
        advance(tokens[:, start : min(start + step, last)])
    return tokens[:, last:]


def _ended(text: Sequence[int], order: Order, pair: Pair) -> bool:
    return len(text) >= order.room or (bool(text) and text[-1] in pair.eos_token_ids)
