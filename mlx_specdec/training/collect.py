"""Training data: completions by the target, and hidden states with the token after each, on disk.
Samples are appended one at a time, and single rows are read. A sample counts as soon as its length
is written. Opening the files truncates an incomplete sample."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import mlx.core as mx
import numpy as np

from .. import Options, PromptError, Request, generate_many
from ..engine.pair import Pair
from ..types import FINAL, Progress, feed
from .config import TrainConfig

_RAW = {2: (np.uint16, mx.uint16), 4: (np.uint32, mx.uint32)}
"""Bytes of a dtype -> the numpy and MLX integers that hold its bits. numpy has no bfloat16."""
TEMPERATURES = 1.0, 0.7, 0.0
"""Sampling temperatures of the completions, each used equally often."""
BATCH = 16
"""The number of texts that the target completes together."""
PREFILL_TOKENS = 512
"""Tokens of each text in one pass for hidden states."""
STATE_TOKENS = 8192
"""The most tokens, padding included, of the texts in one pass for hidden states."""


class SampleFiles:
    """Files with the rows of all samples. states.bin has hidden states, (rows, width) of `dtype`.
    The file tokens.bin has the token after each state, (rows,) int32. The file lengths.bin has the
    number of rows of each sample, (samples,) int32, which is 0 for a sample that is too short."""

    def __init__(self, directory: Path, width: int, dtype: mx.Dtype) -> None:
        self._width = width
        self._dtype = dtype
        self._raw, self._view = _RAW[dtype.size]
        names = ("states.bin", "tokens.bin", "lengths.bin")
        self._states, self._tokens, self._lengths = (directory / name for name in names)
        for file in (self._states, self._tokens, self._lengths):
            file.touch()
        os.truncate(self._lengths, self._lengths.stat().st_size // 4 * 4)
        rows = int(self.lengths.sum())
        os.truncate(self._tokens, rows * 4)
        os.truncate(self._states, rows * width * dtype.size)

    @property
    def lengths(self) -> np.ndarray:
        return np.fromfile(self._lengths, np.int32)

    def append(self, tokens: Sequence[int], states: mx.array | None) -> None:
        """Append a sample, which may be empty. states: The hidden state that predicts each token,
        (len(tokens), width); None without tokens."""
        if states is not None:
            _append(self._states, np.array(states.astype(self._dtype).view(self._view)))
            _append(self._tokens, np.array(tokens, np.int32))
        _append(self._lengths, np.array([len(tokens)], np.int32))

    def states(self, rows: np.ndarray) -> mx.array:
        """Read the hidden states of some rows, (len(rows), width)."""
        every = np.memmap(self._states, self._raw, "r").reshape(-1, self._width)
        return mx.array(np.ascontiguousarray(every[rows])).view(self._dtype)

    def targets(self, count: int) -> np.ndarray:
        """Return the tokens that Medusa heads learn to predict, (rows, count) int32. Head i has the
        token i + 1 positions after the token of its row, or -1 after the end of the sample."""
        tokens, lengths = self.tokens(), self.lengths
        ends = np.repeat(np.cumsum(lengths), lengths)
        places = np.arange(len(tokens))[:, None] + 1 + np.arange(count)
        following = tokens[np.minimum(places, max(len(tokens) - 1, 0))]
        return np.where(places < ends[:, None], following, -1).astype(np.int32)

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of the samples to train on, and of the held-out samples. These are
        the last `share` of the samples that are not empty. At least one sample is held out."""
        used = np.flatnonzero(self.lengths)
        first = len(used) - max(1, int(share * len(used)))
        return used[:first], used[first:]

    @property
    def starts(self) -> np.ndarray:
        """The first row of each sample, (samples,) int64."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths

    def tokens(self) -> np.ndarray:
        """Return the token that follows each row, (rows,) int32."""
        return np.fromfile(self._tokens, np.int32)

    def texts(self) -> list[list[int]]:
        """Return the tokens of each sample."""
        return [part.tolist() for part in np.split(self.tokens(), self.starts[1:])]


def _append(file: Path, values: np.ndarray) -> None:
    with file.open("ab") as stream:
        stream.write(values.tobytes())


Ids = tuple[int, ...]
Piece = tuple[Ids, Ids]
"""A prompt and its completion, which is empty if the model generates it."""
TrainingSample = tuple[str, str]
"""A prompt of the data file, and its completion or ""."""


def collect(
    pair: Pair,
    samples: Sequence[TrainingSample],
    config: TrainConfig,
    rows: SampleFiles,
    progress: Progress,
    hidden: Sequence[str] = (),
) -> list[Ids]:
    """Append the samples that `rows` lacks, and return the prompt of every sample.

    Raises PromptError if fewer than two samples are long enough.

    Args:
        rows: The files, which may hold samples of an interrupted call.
        progress: Called with (done, total) samples.
        hidden: Names of hidden states that are stored in front of the final state. If there are
            any, the rows of a sample begin with its prompt.
    """
    longest = pair.target.max_length or config.length
    config = replace(config, length=min(config.length, longest))
    pieces = list(islice(_pieces(pair, samples, config), config.samples))
    done = len(rows.lengths)
    progress(min(done, len(pieces)), len(pieces))
    # An interrupted batch begins again, because a batch of other texts rounds differently.
    for begin in range(done - done % BATCH, len(pieces), BATCH):
        batch = pieces[begin : begin + BATCH]
        if config.self_distill:
            batch = _completed(pair, batch, config, begin)
        batch = batch[max(0, done - begin) :]
        found = states(pair, [piece for piece in batch if len(piece[1]) > 1], (*hidden, FINAL))
        for prompt, tokens in batch:
            if len(tokens) < 2:  # nothing remains to be predicted after a single token
                rows.append((), None)
            else:
                if hidden:
                    tokens = (*pair.target.prefix(prompt)[1:], *tokens)
                rows.append(tokens, next(found)[-len(tokens) :])
            progress(len(rows.lengths), len(pieces))
    if int((rows.lengths > 0).sum()) < 2:
        raise PromptError(
            "the data has fewer than two texts to learn from: give more of them"
            + ("" if config.self_distill else ', with "target" for an encoder-decoder model')
        )
    return [prompt for prompt, _ in pieces]


def _completed(pair: Pair, pieces: Sequence[Piece], config: TrainConfig, first: int) -> list[Piece]:
    """Return prompts with sampled completions. first: The number of the first prompt."""
    shared = pair.target.kind == "decoder-only"
    requests = []
    for number, (prompt, _) in enumerate(pieces, first):
        options = Options(
            max_tokens=config.length - shared * len(prompt),
            temperature=TEMPERATURES[number % len(TEMPERATURES)],
            seed=number,
            regular=True,
            cost_cache=False,
        )
        requests.append(Request(prompt, options))
    # Training names no languages, which some translation models want of a request.
    results = generate_many(replace(pair, languages=None), requests, batch_size=BATCH)
    return [(piece[0], result.tokens) for piece, result in zip(pieces, results, strict=True)]


def states(pair: Pair, pieces: Sequence[Piece], names: Sequence[str]) -> Iterator[mx.array]:
    """Yield the hidden states of each prompt and its completion except for the last token, next to
    each other, (tokens, names x width)."""
    fed = [[*pair.target.prefix(prompt), *tokens[:-1]] for prompt, tokens in pieces]
    longest = max(map(len, fed), default=1)
    size = 1 if pair.target.why_not_batched else max(1, STATE_TOKENS // longest)
    for first in range(0, len(fed), size):
        some = fed[first : first + size]
        context = pair.target.open_batch([prompt for prompt, _ in pieces[first : first + size]])
        parts = []
        for start in range(0, max(map(len, some)), PREFILL_TOKENS):
            part = [row[start : start + PREFILL_TOKENS] for row in some]
            hidden = feed(context, part, names).hidden
            parts.append(mx.concatenate([hidden[name] for name in names], axis=-1))
            mx.eval(parts[-1])
        joined = mx.concatenate(parts, axis=1)
        yield from (joined[row, : len(tokens)] for row, tokens in enumerate(some))


def _pieces(pair: Pair, samples: Sequence[TrainingSample], config: TrainConfig) -> Iterator[Piece]:
    """Encode the samples, cut to the lengths of `config`."""
    generates, length, encode = config.self_distill, config.length, pair.tokenizer.encode
    chat = generates and pair.tokenizer.has_chat_template
    for text, completion in samples:
        if not text.startswith(pair.task_prefix.rstrip()):
            text = pair.task_prefix + text
        prompt = tuple((pair.tokenizer.apply_chat if chat else encode)(text))
        target = () if generates or not completion.strip() else tuple(encode(completion))
        if pair.target.kind == "encoder-decoder":
            if 0 < len(prompt) <= length and (generates or target):
                yield prompt, target[:length]
        elif generates:
            # Half of the length is for the completion.
            yield from ((part, ()) for part in _parts(prompt, length // 2))
        elif target:
            if prompt and length - len(prompt) > 1:
                yield prompt, target[: length - len(prompt)]
        else:
            yield from ((part[:1], part[1:]) for part in _parts(prompt, length) if len(part) > 2)


def _parts(ids: Ids, length: int) -> Iterator[Ids]:
    return (ids[start : start + length] for start in range(0, len(ids), length))
