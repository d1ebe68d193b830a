"""Verification of a converted checkpoint. Every tensor is read back, and both models compute a
fixed input, one after the other, in float32."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from .. import system
from ..checkpoints.tensors import Tensor, TensorReader
from ..checkpoints.writer import TensorChange
from ..errors import CheckpointError, OutputError, PromptError, SpecdecError
from ..models.base import Base
from ..models.loading import Loaded, load_model
from ..text.tokenizer import load_tokenizer

SHARE_OF_MEMORY, SHARE_OF_SHARD, QUICK_BYTES = 0.5, 1.2, 600_000_000
"""Limits of a model's size in memory when its logits are compared. The first is a share of the
machine's memory. The second is a multiple of `shard_bytes`, and the third is in bytes. The third
does not hold for quantized results: running both models takes longer than the conversion."""
BYTES_PER_LOADED_WEIGHT = 6
"""Bytes per weight while a model is loaded in float32: 4 for the weight and 2 for its source."""
SAME_LOGITS = 1e-3
"""Largest difference of log-probabilities if no weight has changed."""


@dataclass(frozen=True)
class Differences:
    """The largest absolute differences from the source's values, with the tensors' names. Tensors
    that the conversion has quantized are separate; `quantized` is None without any."""

    tensors: int
    plain: float
    plain_name: str
    quantized: float | None
    quantized_name: str


def compare(
    written: TensorReader,
    tensors: Iterable[tuple[str, Tensor]],
    change: Callable[[str, Tensor], TensorChange],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Differences:
    """Compare written tensors bit for bit with tensors computed from the source again. Raises
    OutputError if one differs. tensors: Final name and tensor of the source. change: Returns the
    change of a tensor. progress: Called with the source bytes of each piece."""
    largest: dict[bool, tuple[float, str]] = {}
    count = 0
    for name, source in tensors:
        changed = change(name, source)
        for part, outline in changed.outlines(name, source).items():
            result = written.tensor(part)
            if (result.dtype, result.shape) != (outline.dtype, outline.shape):
                raise _wrong(name, "is of another type or shape than was asked for")
        quantized = changed.quantization is not None
        difference = _difference(written, name, source, changed, progress)
        if difference > largest.get(quantized, (-1.0, ""))[0]:
            largest[quantized] = difference, name
        count += 1
    return Differences(count, *largest.get(False, (0.0, "")), *largest.get(True, (None, "")))


def _difference(
    written: TensorReader,
    name: str,
    source: Tensor,
    change: TensorChange,
    progress: Callable[[int], None],
) -> float:
    largest = 0.0
    for begin, piece in source.pieces():
        end = begin + (piece.shape[0] if piece.ndim else 1)
        again = change.stored(name, change.cast(piece))
        rows = {part: written.rows(part, begin, end) for part in again}
        if not all(mx.array_equal(_bits(rows[part]), _bits(again[part])).item() for part in again):
            raise _wrong(name, "differs from its source")
        largest = max(largest, _distance(rows, name, piece, change))
        progress(piece.nbytes)
        del piece, again, rows
    mx.clear_cache()
    return largest


def _distance(
    rows: Mapping[str, mx.array], name: str, source: mx.array, change: TensorChange
) -> float:
    values = rows[name]
    if source.size == 0 or (change.quantization is None and values.dtype == source.dtype):
        return 0.0
    if change.quantization is not None:
        path = name.removesuffix(".weight")
        values = change.quantization.dequantize(
            values, rows[f"{path}.scales"], rows.get(f"{path}.biases")
        )
    distance = mx.abs(values.astype(mx.float32) - source.astype(mx.float32))
    return mx.max(distance).item()  # type: ignore[return-value]


def _bits(array: mx.array) -> mx.array:
    kinds = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
    return array if array.dtype == mx.bool_ else array.view(kinds[array.dtype.size])


def _wrong(name: str, problem: str) -> OutputError:
    return OutputError(f"read back, {name} {problem}: the disk may be failing, convert again")


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


def verify(
    source: Path,
    result: Path,
    parameters: int,
    differences: Differences,
    *,
    compare_logits: Callable[[Path, Path], float] | None,
    compare_text: Callable[[Path, Path], TextChange] | None,
    shard_bytes: int,
) -> Verified:
    """Compare what source and result compute, if that is fast enough.

    The models are compared on a fixed text as well if weights were quantized. Raises
    CheckpointError if the result computes something else than the source.

    Args:
        parameters: The number of weights.
        differences: The result of comparing every tensor.
        compare_logits: Returns the largest difference of log-probabilities; None to skip.
        compare_text: Scores the fixed text; None to skip.
        shard_bytes: The most bytes in a file of the result, which also limits the memory.
    """
    quantized = differences.quantized is not None
    needed, reason = parameters * BYTES_PER_LOADED_WEIGHT, ""
    if compare_logits is None:
        return Verified(None, None, "no comparison was asked for")
    if needed > SHARE_OF_MEMORY * system.memory():
        reason = "a whole model does not fit in memory"
    elif needed > SHARE_OF_SHARD * shard_bytes:
        reason = "a whole model takes more memory than its conversion"
    elif not quantized and needed > QUICK_BYTES:
        reason = "it would take longer than the conversion"
    if reason:
        return Verified(None, None, reason)
    difference = compare_logits(source, result)
    unchanged = differences.plain == 0 and not quantized
    if math.isnan(difference) or (unchanged and difference > SAME_LOGITS):
        differ = f"(log-probabilities differ by {difference:.3g}): please report this checkpoint"
        raise CheckpointError(f"the converted model does not compute what its source does {differ}")
    if compare_text is None or not quantized:
        return Verified(difference, None, "")
    try:
        return Verified(difference, compare_text(source, result), "")
    except SpecdecError as problem:  # both models were loaded, so the tokenizer is the problem
        return Verified(difference, None, str(problem))


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
_Answer = TypeVar("_Answer")


def compare_logits(source: Path, result: Path) -> float:
    """Return the largest difference of log-probabilities on a fixed input, or raise
    CheckpointError."""
    first, second = (_with_model(directory, _fixed_rows) for directory in (source, result))
    return float(mx.max(mx.abs(first - second)).item())  # type: ignore[arg-type]


def compare_text(source: Path, result: Path) -> TextChange:
    """Score the fixed text with the result's tokenizer. Raises CheckpointError, PromptError."""
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
    # Dequantized weights have the same values and are much faster on a CPU.
    loaded = load_model(directory, dtype="float32", expand=True)
    try:
        return answer(loaded)
    finally:
        del loaded
        mx.clear_cache()


def _fixed_rows(loaded: Loaded) -> mx.array:
    rows = mx.concatenate(list(_log_probabilities(loaded.model, range(2, 10), range(2, 7))))
    mx.eval(rows)
    return rows


def _score_text(loaded: Loaded, tokenizer: Path) -> tuple[mx.array, mx.array]:
    """Score the text. Return the log-probability of each token, (tokens,) float32, and the token
    that the model finds most likely at each position, (tokens,) integer."""
    encode = load_tokenizer(tokenizer, kind=loaded.kind).encode
    if loaded.kind == "encoder-decoder":
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
    context = model.open(prompt)
    fed = [*model.prefix(prompt)[-1:], *text[:-1]]
    for begin in range(0, len(fed), PASS_TOKENS):
        logits = context.advance(
            mx.array([fed[begin : begin + PASS_TOKENS]], dtype=mx.int32)
        ).logits[0]
        logits = logits.astype(mx.float32)
        yield logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def _perplexity(log_probabilities: mx.array) -> float:
    return math.exp(min(-float(mx.mean(log_probabilities).item()), 700.0))  # type: ignore[arg-type]
