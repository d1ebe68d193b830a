"""Prompts -> the completions that a model writes, several of them in one pass.

They begin side by side; one whose prompt is longer is fed the rest of it while others are written
already. So there is no padding before a prompt, and every kind of cache will do.
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

TOKENS_A_PASS = 512
"""Most prompt tokens, of all prompts together, in one pass."""


@dataclass(frozen=True)
class Request:
    """One completion. prompt: token ids. max_tokens: of the completion. seed: of its noise."""

    prompt: tuple[int, ...]
    max_tokens: int
    seed: int


def batches(lengths: Sequence[int], size: int, seed: int) -> list[list[int]]:
    """Numbers of the prompts, `size` together whose lengths are close; the batches shuffled, so
    that the last ones are no longer than others."""
    order = sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    groups = [sorted(order[start : start + size]) for start in range(0, len(order), size)]
    random.Random(seed).shuffle(groups)
    return groups


def batch_generate(
    pair: Pair, requests: Sequence[Request], temperature: float
) -> list[tuple[int, ...]]:
    """The completions, each as plain decoding writes it with its seed, an end-of-text token
    included.

    Raises PromptError for a prompt that the model does not take.
    """
    prefixes = [pair.target.prefix(request.prompt) for request in requests]
    sampling = Sampling(temperature=temperature)
    noises = [CoupledNoise(each.seed, pair.vocabulary, each.prompt) for each in requests]
    texts: list[list[int]] = [[] for _ in requests]
    going = set(range(len(requests)))
    advance = pair.target.open_batch([request.prompt for request in requests])
    length = min(len(prefix) for prefix in prefixes)
    fed = _prefill(advance, [prefix[:length] for prefix in prefixes])
    while True:
        log_p = log_probabilities(advance(fed)[:, -1], sampling, pair.vocabulary)
        gumbel = None
        if temperature > 0:
            places = [max(0, length - len(prefix)) for prefix in prefixes]
            rounds = (n.at(0, place) for n, place in zip(noises, places, strict=True))
            gumbel = mx.concatenate([each.target(1)[:, 0] for each in rounds])
        chosen: list[int] = choose(log_p, gumbel).tolist()  # type: ignore[assignment]
        for row, (prefix, text) in enumerate(zip(prefixes, texts, strict=True)):
            if length < len(prefix):
                chosen[row] = prefix[length]
            elif row in going:
                text.append(chosen[row])
                ended = chosen[row] in pair.eos_token_ids
                if ended or len(text) >= requests[row].max_tokens:
                    going.remove(row)
        if not going:
            return [tuple(text) for text in texts]
        fed = mx.array(chosen, dtype=mx.int32)[:, None]
        length += 1


def _prefill(advance: BatchPass, prefixes: list[list[int]]) -> mx.array:
    """All but the last token of prefixes of one length are seen; returns the last, (batch, 1)."""
    tokens = mx.array(prefixes, dtype=mx.int32)
    last, step = tokens.shape[1] - 1, max(1, TOKENS_A_PASS // len(prefixes))
    for start in range(0, last, step):
        # Its logits are not read, and so not computed.
        advance(tokens[:, start : min(start + step, last)])
    return tokens[:, last:]
