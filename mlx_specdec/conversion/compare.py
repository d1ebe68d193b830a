"""Two checkpoints side by side: how far a conversion moved the log-probabilities of fixed inputs.

One model at a time is in memory, in float32. The fixed text is our own, in three manners; changing
a word of it changes every perplexity that was reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from ..errors import PromptError
from ..models.base import Base
from ..models.loading import Loaded, load_model
from ..text.tokenizer import load_tokenizer
from .verify import TextChange

LONGEST = 256
"""Tokens of one text."""
STEP = 32
"""Tokens of one pass: whole rows of logits are in memory for no more."""
_Answer = TypeVar("_Answer")


def compare_logits(source: Path, result: Path) -> float:
    """Largest absolute difference of log-probabilities of two checkpoints on a fixed input. Raises
    CheckpointError."""
    first, second = (_with_model(directory, _fixed_rows) for directory in (source, result))
    return float(mx.max(mx.abs(first - second)).item())  # type: ignore[arg-type]


def compare_text(source: Path, result: Path) -> TextChange:
    """How the fixed text, split by the result's tokenizer, fares with both models. Raises
    CheckpointError, PromptError."""
    score = partial(_score_text, tokenizer=result)
    (first, first_top), (second, second_top) = (_with_model(d, score) for d in (source, result))
    changes = mx.abs(second - first)
    return TextChange(
        tokens=first.size,
        source_perplexity=_perplexity(first),
        result_perplexity=_perplexity(second),
        mean=mx.mean(changes).item(),  # type: ignore[arg-type]
        largest=mx.max(changes).item(),  # type: ignore[arg-type]
        same_first=mx.mean((first_top == second_top).astype(mx.float32)).item(),  # type: ignore[arg-type]
    )


def _with_model(directory: Path, answer: Callable[[Loaded], _Answer]) -> _Answer:
    loaded = load_model(directory, dtype="float32")
    try:
        return answer(loaded)
    finally:
        del loaded
        mx.clear_cache()


def _fixed_rows(loaded: Loaded) -> mx.array:
    prompt = list(range(2, 10))
    rows = mx.concatenate(list(_log_probabilities(loaded.model, prompt, prompt[:5])))
    mx.eval(rows)
    return rows


def _score_text(loaded: Loaded, tokenizer: Path) -> tuple[mx.array, mx.array]:
    """Log-probability of every token of the text and the likeliest token there, each (tokens,)."""
    encode = load_tokenizer(tokenizer, kind=loaded.kind).encode
    if loaded.kind == "encoder-decoder":
        texts = [(encode(prompt), encode(text)) for prompt, text in PAIRS]
    else:
        ids = encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    own, top = [], []
    for prompt, text in texts:
        longest = loaded.model.max_length
        text = text[: LONGEST if longest is None else min(LONGEST, longest - 1)]
        if not text or max(text) >= loaded.model.vocabulary:
            raise PromptError("the tokenizer makes ids of it that the model does not have")
        place = 0
        for rows in _log_probabilities(loaded.model, prompt, text):
            token = mx.array(text[place : place + len(rows)])[:, None]
            own.append(mx.take_along_axis(rows, token, axis=-1)[:, 0])
            top.append(mx.argmax(rows, axis=-1))
            mx.eval(own[-1], top[-1])
            place += len(rows)
    return mx.concatenate(own), mx.concatenate(top)


def _log_probabilities(
    model: Base, prompt: Sequence[int], text: Sequence[int]
) -> Iterator[mx.array]:
    """For each token of a text what predicts it, (tokens, vocabulary), a few at a time."""
    context = model.open(prompt)
    fed = [*model.prefix(prompt)[-1:], *text[:-1]]
    for begin in range(0, len(fed), STEP):
        logits = context.advance(mx.array([fed[begin : begin + STEP]], dtype=mx.int32)).logits[0]
        logits = logits.astype(mx.float32)
        yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _perplexity(log_probabilities: mx.array) -> float:
    return math.exp(min(-float(mx.mean(log_probabilities).item()), 700.0))  # type: ignore[arg-type]


PAIRS = (
    (
        "translate English to French: The bridge over the river was closed after the storm.",
        "Le pont sur la rivière a été fermé après la tempête.",
    ),
    (
        "translate English to French: My sister keeps three bicycles in a very small garage.",
        "Ma sœur garde trois vélos dans un tout petit garage.",
    ),
    (
        "translate English to French: Please bring the blue folder to the meeting on Tuesday.",
        "Veuillez apporter le dossier bleu à la réunion de mardi.",
    ),
    (
        "summarize: The bakery on the corner opened at six. By seven the queue reached the square, "
        "and by eight there was no bread left, only the smell of it.",
        "The bakery on the corner sold all of its bread within two hours.",
    ),
    (
        "question: Why did the train stop? context: A tree had fallen on the line near the tunnel, "
        "so the train waited at the last station until the track was clear.",
        "A tree had fallen on the line.",
    ),
)
"""(input of the encoder, what the decoder is to say), for encoder-decoder models."""

PASSAGE = (
    "The lighthouse keeper counted the ships every evening and wrote the number in a green book. "
    "On clear days there were about thirty; in winter, when the ice came down from the north, "
    "there were two or three. He never learned where they went, but he noticed that the same "
    "captains waved at the same rocks, year after year.\n\n"
    "To add two fractions, bring them to a common denominator, add the numerators and keep the "
    "denominator. One half and one third make five sixths, because three sixths and two sixths "
    "are five of the same parts.\n\n"
    "def mean(values):\n"
    '    """The arithmetic mean of a list of numbers."""\n'
    "    total = 0.0\n"
    "    for value in values:\n"
    "        total += value\n"
    "    return total / len(values)\n"
)
"""For decoder-only models."""
