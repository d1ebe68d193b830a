"""Two checkpoints on the fixed text: what a conversion did to the probabilities of its tokens.

Knows how models and tokenizers are loaded. One model at a time is in memory, and of each only a few
numbers a token are kept.
"""

from __future__ import annotations

import math
from pathlib import Path

import mlx.core as mx

from .checkpoints.verify import TextChange
from .errors import PromptError, SpecdecError
from .models.base import Base
from .models.loading import load_model
from .text.fixed import PAIRS, PASSAGE
from .text.tokenizer import Tokenizer, load_tokenizer

LONGEST = 256
"""Tokens of one text."""
STEP = 32
"""Tokens of one pass: whole rows of logits are in memory for no more."""


def compare_text(source: Path, result: Path) -> TextChange | str:
    """How the fixed text fares with both, in float32; a sentence where it cannot be read.

    The text is split by the result's tokenizer. Raises CheckpointError where a model does not load.
    """
    first = _scores(source, result)
    second = _scores(result, result) if not isinstance(first, str) else first
    if isinstance(first, str) or isinstance(second, str):
        return str(first if isinstance(first, str) else second)
    changes = mx.abs(second[0] - first[0])
    return TextChange(
        tokens=first[0].size,
        source_perplexity=_perplexity(first[0]),
        result_perplexity=_perplexity(second[0]),
        mean=mx.mean(changes).item(),  # type: ignore[arg-type]
        largest=mx.max(changes).item(),  # type: ignore[arg-type]
        same_first=mx.mean((first[1] == second[1]).astype(mx.float32)).item(),  # type: ignore[arg-type]
    )


def _perplexity(log_p: mx.array) -> float:
    mean: float = mx.mean(log_p).item()  # type: ignore[assignment]
    return math.exp(min(-mean, 700.0))


def _scores(directory: Path, tokenized_by: Path) -> tuple[mx.array, mx.array] | str:
    """Log p of every token of the text and the likeliest token there, each of shape (tokens,)."""
    loaded = load_model(directory, dtype="float32")
    try:
        tokenizer = load_tokenizer(tokenized_by, kind=loaded.kind)
        texts = _texts(tokenizer, paired=loaded.kind == "encoder-decoder")
        parts = [_score(loaded.model, prompt, text) for prompt, text in texts]
    except SpecdecError as problem:
        return str(problem)
    finally:
        del loaded
        mx.clear_cache()
    return mx.concatenate([log_p for log_p, _ in parts]), mx.concatenate([top for _, top in parts])


def _texts(tokenizer: Tokenizer, *, paired: bool) -> list[tuple[list[int], list[int]]]:
    """(prompt, what is scored behind it), in token ids."""
    if paired:
        return [(tokenizer.encode(prompt), tokenizer.encode(text)) for prompt, text in PAIRS]
    ids = tokenizer.encode(PASSAGE)
    return [(ids[:1], ids[1:])]


def _score(model: Base, prompt: list[int], text: list[int]) -> tuple[mx.array, mx.array]:
    """Of one text. Raises PromptError for ids that the model does not have."""
    context = model.open(prompt)
    last = model.prefix(prompt)[-1:]
    room = LONGEST if model.max_length is None else min(LONGEST, model.max_length - len(last))
    wanted = text[:room]
    if not wanted or max(wanted) >= model.vocabulary:
        raise PromptError("the tokenizer makes ids of it that the model does not have")
    fed, parts = last + wanted[:-1], []
    for begin in range(0, len(fed), STEP):
        logits = context.advance(mx.array([fed[begin : begin + STEP]])).logits[0]
        logits = logits.astype(mx.float32)
        token = mx.array(wanted[begin : begin + STEP])[:, None]
        log_p = mx.take_along_axis(logits, token, axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
        parts.append((log_p, mx.argmax(logits, axis=-1)))
        mx.eval(parts[-1])
    return mx.concatenate([one for one, _ in parts]), mx.concatenate([top for _, top in parts])
