"""Compares the logits and texts of the source and of the result of a conversion. Both are loaded
once, in float32, one after the other."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from .. import system
from ..checkpoints.writer import Written
from ..errors import CheckpointError, PromptError, SpecdecError
from ..models.base import Base
from ..models.loading import Loaded, load_model
from ..text.tokenizer import load_tokenizer

SHARE_OF_SHARD, QUICK_BYTES = 1.2, 600_000_000
"""Limits of a model's size in memory when its logits are compared, as a multiple of the largest
file of a result and in bytes. The second does not hold for quantized results: running both models
takes longer than the conversion."""
BYTES_PER_LOADED_WEIGHT = 6
"""Bytes per weight while a model is loaded in float32: 4 for the weight and 2 for its source."""
SAME_LOGITS = 1e-3
"""Largest difference of log-probabilities if no weight has changed."""


@dataclass(frozen=True)
class TextChange:
    """The scores of a fixed text under the source and the result, teacher-forced.

    Attributes:
        tokens: The number of tokens.
        source_perplexity, result_perplexity: exp(-mean log p).
        mean, largest: Mean and largest absolute change of the tokens' log p, in nats.
        same_first: The share of positions with the same most likely token.
    """

    tokens: int
    source_perplexity: float
    result_perplexity: float
    mean: float
    largest: float
    same_first: float

    def describe(self) -> str:
        """Return the figures in one line."""
        return (
            f"fixed text of {self.tokens} tokens: perplexity {self.source_perplexity:.4g} -> "
            f"{self.result_perplexity:.4g}, log-probability changes by {self.mean:.3g} on average, "
            f"{self.largest:.3g} at most; same first choice at {self.same_first:.1%}"
        )


@dataclass(frozen=True)
class Verified:
    """The result of comparing the models. logits: The largest difference of log-probabilities, None
    if they were not compared. text: The scores of the fixed text, None if it was not scored. note:
    The reason."""

    logits: float | None
    text: TextChange | None
    note: str

    def describe(self) -> list[str]:
        if self.logits is None:
            return [f"logits not compared: {self.note}"]
        lines = [f"log-probabilities on a fixed input: largest difference {self.logits:.3g}"]
        if self.note:
            lines.append(f"fixed text not scored: {self.note}")
        return lines if self.text is None else [*lines, self.text.describe()]


def compare(source: Path, result: Path, written: Written) -> Verified:
    """Compare what source and result compute, if that is fast enough: log-probabilities on a fixed
    input, and the scores of a fixed text if weights were quantized. Raises CheckpointError if the
    result computes something else than the source."""
    quantized = True in written.largest
    needed = written.parameters * BYTES_PER_LOADED_WEIGHT
    if needed > SHARE_OF_SHARD * system.default_shard_bytes():
        return Verified(None, None, "a whole model takes too much memory")
    if not quantized and needed > QUICK_BYTES:
        return Verified(None, None, "it would take longer than the conversion")
    rows, scores, problems = zip(
        *(_answers(place, result, quantized) for place in (source, result)), strict=True
    )
    # Ids that are never written have -inf in both.
    apart = mx.where(rows[0] == rows[1], 0.0, mx.abs(rows[0] - rows[1]))
    difference = mx.max(apart).item()
    assert isinstance(difference, float)
    unchanged = not quantized and written.largest.get(False, (0.0,))[0] == 0
    if math.isnan(difference) or (unchanged and difference > SAME_LOGITS):
        differ = f"(log-probabilities differ by {difference:.3g}): please report this checkpoint"
        raise CheckpointError(f"the converted model does not compute what its source does {differ}")
    problem = next(filter(None, problems), "")
    return Verified(difference, _change(*scores) if quantized and not problem else None, problem)


LONGEST_SCORED = 256
"""The most tokens of a fixed text that are scored."""
PASS_TOKENS = 32
"""Tokens per pass. The logits of one pass are in memory."""
_TEXTS = json.loads(Path(__file__).with_name("fixed_texts.json").read_text(encoding="utf-8"))
PAIRS: list[list[str]] = _TEXTS["pairs"]
"""[prompt, completion] for encoder-decoder models. Do not change the fixed texts: perplexities
would no longer be comparable with reported ones."""
PASSAGE = "\n".join(_TEXTS["passage"])
"""The fixed text for decoder-only models."""


def _answers(
    directory: Path, tokenizer: Path, with_text: bool
) -> tuple[mx.array, tuple[mx.array, mx.array], str]:
    """Return log-probabilities on a fixed input, (tokens, vocabulary) float32, the scores of the
    fixed text, and why there are none, or ""."""
    # Dequantized weights have the same values and are much faster on a CPU.
    loaded = load_model(directory, dtype="float32", expand=True)
    rows = mx.concatenate(list(_log_probabilities(loaded.model, range(2, 10), range(2, 7))))
    mx.eval(rows)
    scores, problem = (mx.array([]), mx.array([])), ""
    try:
        if with_text:
            scores = _score_text(loaded, tokenizer)
    except SpecdecError as caught:  # the model was loaded, so the tokenizer is the problem
        problem = str(caught)
    del loaded
    mx.clear_cache()
    return rows, scores, problem


def _change(first: tuple[mx.array, mx.array], second: tuple[mx.array, mx.array]) -> TextChange:
    changes = mx.abs(second[0] - first[0])
    same: mx.array = first[1] == second[1]
    return TextChange(
        tokens=changes.size,
        source_perplexity=_perplexity(first[0]),
        result_perplexity=_perplexity(second[0]),
        mean=mx.mean(changes).item(),  # type: ignore[arg-type]
        largest=mx.max(changes).item(),  # type: ignore[arg-type]
        same_first=mx.mean(same.astype(mx.float32)).item(),  # type: ignore[arg-type]
    )


def _score_text(loaded: Loaded, tokenizer: Path) -> tuple[mx.array, mx.array]:
    """Return the log-probability of each token of the fixed text, (tokens,) float32, and the token
    that the model finds most likely at each position, (tokens,) integer. Raises CheckpointError,
    PromptError."""
    encode = load_tokenizer(tokenizer, kind=loaded.model.kind).encode
    if loaded.model.kind == "encoder-decoder":
        texts = [(encode(prompt), encode(text)) for prompt, text in PAIRS]
    else:
        ids = encode(PASSAGE)
        texts = [(ids[:1], ids[1:])]
    scores, top = [], []
    for prompt, text in texts:
        longest = loaded.model.max_length
        text = text[: LONGEST_SCORED if longest is None else min(LONGEST_SCORED, longest - 1)]
        if not text or max(text) >= loaded.model.vocabulary:
            raise PromptError("the tokenizer makes ids of it that the model does not have")
        place = 0
        for rows in _log_probabilities(loaded.model, prompt, text):
            token = mx.array(text[place : place + len(rows)])[:, None]
            scores.append(mx.take_along_axis(rows, token, axis=-1)[:, 0])
            top.append(mx.argmax(rows, axis=-1))
            mx.eval(scores[-1], top[-1])
            place += len(rows)
    return mx.concatenate(scores), mx.concatenate(top)


def _log_probabilities(
    model: Base, prompt: Sequence[int], text: Sequence[int]
) -> Iterator[mx.array]:
    """Yield the log-probabilities that predict a text, (tokens, vocabulary), of PASS_TOKENS
    tokens."""
    context = model.open_batch([prompt])
    fed = [*model.prefix(prompt)[-1:], *text[:-1]]
    for begin in range(0, len(fed), PASS_TOKENS):
        logits = context.advance(
            mx.array([fed[begin : begin + PASS_TOKENS]], dtype=mx.int32)
        ).logits[0]
        logits = logits.astype(mx.float32)
        yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _perplexity(log_probabilities: mx.array) -> float:
    return math.exp(min(-float(mx.mean(log_probabilities).item()), 700.0))  # type: ignore[arg-type]
