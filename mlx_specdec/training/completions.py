"""Completions for training, and the hidden states of texts, in batches. The target takes plain
decoding steps without a request for each text. With hundreds of texts in a pass, the host would
need more time for requests than a GPU needs for the model."""

from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np

from .. import DecodingError
from ..engine.pair import Pair
from ..types import Context, feed

Ids = tuple[int, ...]
READ_EVERY = 16
"""Steps after which the host reads the sampled tokens and drops the texts that have ended."""
PREFILL_TOKENS = 512
"""Tokens of each text in one pass of a prefill."""
STATE_TOKENS = 8192
"""The most tokens, padding included, of the texts in one pass for hidden states."""


def complete(
    pair: Pair,
    prompts: Sequence[Ids],
    most: Sequence[int],
    temperatures: Sequence[float],
    seed: int,
) -> list[Ids]:
    """Sample a completion of each prompt, up to and including an EOS token.

    Args:
        prompts: A single one if the target does not decode batches.
        most: The maximum number of tokens of each completion.
        temperatures: The sampling temperature of each completion.
        seed: Determines the completions together with the prompts of the batch.
    Raises:
        DecodingError: If logits are NaN or infinite.
    """
    context, newest = _prefilled(pair, prompts)
    keys = mx.random.split(mx.random.key(seed), max(most))
    heat = mx.array(list(temperatures), dtype=mx.float32)[:, None]
    rows, unread = list(range(len(prompts))), []
    done: list[list[int]] = [[] for _ in prompts]
    for step in range(max(most)):
        logits = context.advance(newest).logits[:, -1, : pair.vocabulary].astype(mx.float32)
        newest = _sampled(logits, heat, keys[step])[:, None]
        mx.async_eval(newest)
        unread.append(newest)
        if len(unread) < READ_EVERY and step + 1 < max(most):
            continue
        staying = []
        for place, (row, tokens) in enumerate(zip(rows, _host(unread), strict=True)):
            done[row] += tokens
            end = next((at for at, id in enumerate(done[row]) if id in pair.eos_token_ids), None)
            done[row] = done[row][: most[row] if end is None else min(most[row], end + 1)]
            if end is None and len(done[row]) < most[row]:
                staying.append(place)
        unread = []
        if not staying:
            break
        if len(staying) < len(rows):
            context.keep(staying)
            newest, heat = newest[mx.array(staying)], heat[mx.array(staying)]
            rows = [rows[place] for place in staying]
    mx.clear_cache()
    return [tuple(tokens) for tokens in done]


def states(
    pair: Pair, prompts: Sequence[Ids], completions: Sequence[Ids], names: Sequence[str]
) -> Iterator[mx.array]:
    """Yield the hidden states of each prompt and its completion except for the last token, next to
    each other, (tokens, names x width)."""
    fed = [
        [*pair.target.prefix(prompt), *tokens[:-1]]
        for prompt, tokens in zip(prompts, completions, strict=True)
    ]
    longest = max(map(len, fed), default=1)
    size = 1 if pair.target.why_not_batched else max(1, STATE_TOKENS // longest)
    for first in range(0, len(fed), size):
        some = fed[first : first + size]
        context = pair.target.open_batch(prompts[first : first + size])
        parts = []
        for start in range(0, max(map(len, some)), PREFILL_TOKENS):
            hidden = feed(
                context, [row[start : start + PREFILL_TOKENS] for row in some], names
            ).hidden
            parts.append(mx.concatenate([hidden[name] for name in names], axis=-1))
            mx.eval(parts[-1])
        joined = mx.concatenate(parts, axis=1)
        yield from (joined[row, : len(tokens)] for row, tokens in enumerate(some))


def _prefilled(pair: Pair, prompts: Sequence[Ids]) -> tuple[Context, mx.array]:
    """Return a context of all prompts without their last tokens, and these tokens, (batch, 1)."""
    context = pair.target.open_batch(prompts)
    prefixes = [pair.target.prefix(prompt) for prompt in prompts]
    for start in range(0, max(map(len, prefixes)) - 1, PREFILL_TOKENS):
        end = start + PREFILL_TOKENS
        feed(context, [prefix[:-1][start:end] for prefix in prefixes])
        context.evaluate()
    return context, mx.array([[prefix[-1]] for prefix in prefixes], dtype=mx.int32)


def _sampled(logits: mx.array, temperatures: mx.array, key: mx.array) -> mx.array:
    """Draw a token from each row of logits, (batch,) int32; -1 for damaged logits. temperatures:
    Shape (batch, 1). A temperature of 0 selects the most likely token."""
    sound = mx.isfinite(logits.max(axis=-1))
    # Noise may be infinite, and must not be multiplied by 0.
    noisy = logits + temperatures * mx.random.gumbel(logits.shape, key=key)
    drawn = mx.argmax(mx.where(temperatures > 0, noisy, logits), axis=-1)
    return mx.where(sound, drawn.astype(mx.int32), -1)


def _host(steps: Sequence[mx.array]) -> list[list[int]]:
    """Wait for the tokens of some steps, (batch, 1) each, and return them for each text."""
    tokens = np.array(mx.concatenate(list(steps), axis=1))
    if (tokens < 0).any():
        raise DecodingError("the target's logits are not numbers: its weights are damaged")
    found: list[list[int]] = tokens.tolist()
    return found
