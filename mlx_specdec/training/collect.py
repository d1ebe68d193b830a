"""Training data on disk: hidden states of the target and the token after each. Samples are appended
one at a time, and single rows are read. A sample counts as soon as its length is written. Opening
the files truncates an incomplete sample."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import mlx.core as mx
import numpy as np

from .. import PromptError, system
from ..engine.pair import Pair
from ..models.number_format import on_cpu
from ..types import FINAL, Progress
from .completions import Ids, complete, states
from .config import DataConfig

_RAW = {2: (np.uint16, mx.uint16), 4: (np.uint32, mx.uint32)}
"""Bytes of a dtype -> the numpy and MLX integers that hold its bits. numpy has no bfloat16."""
HELD = 0.25
"""Largest share of a GPU's memory that hidden states may take during training."""


class SampleFiles:
    """Files with the rows of all samples. states.bin has hidden states, (rows, width) of `dtype`.
    The file tokens.bin has the token after each state, (rows,) int32. The file lengths.bin has the
    number of rows of each sample, (samples,) int32, which is 0 for a sample that is too short."""

    def __init__(self, directory: Path, width: int, dtype: mx.Dtype) -> None:
        self._width = width
        self._dtype = dtype
        self._raw, self._view = _RAW[dtype.size]
        self._held: mx.array | None = None
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
        if self._held is not None:
            return self._held[mx.array(rows)]
        every = np.memmap(self._states, self._raw, "r").reshape(-1, self._width)
        return mx.array(np.ascontiguousarray(every[rows])).view(self._dtype)

    def hold(self) -> None:
        """Keep all hidden states on a GPU with memory for them, so that no step waits for them.
        Nothing may be appended from now on."""
        size = self._states.stat().st_size
        if not on_cpu() and 0 < size < HELD * system.usable_memory():
            every = np.fromfile(self._states, self._raw).reshape(-1, self._width)
            self._held = mx.array(every).view(self._dtype)
            mx.eval(self._held)

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
        `share` of the samples that are not empty, at even distances, because neighbors have one
        sampling temperature. At least one sample is held out."""
        used = np.flatnonzero(self.lengths)
        held = max(1, int(share * len(used)))
        ends = np.arange(1, held + 1) * len(used) // held
        return np.delete(used, ends - 1), used[ends - 1]

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


Piece = tuple[Ids, Ids]
"""A prompt and its completion, which is empty if the model generates it."""


TrainingSample = tuple[str, str]
"""A prompt of the data file, and its completion or ""."""


def collect(
    pair: Pair,
    samples: Sequence[TrainingSample],
    config: DataConfig,
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
    groups = [list(range(len(pieces)))]
    if config.self_distill:
        lengths, kinds = [len(prompt) for prompt, _ in pieces], len(config.temperatures)
        at_once = 1 if pair.target.why_not_batched else config.texts_at_once
        groups = batches(lengths, at_once, config.seed, kinds)
    done = len(rows.lengths)
    progress(min(done, len(pieces)), len(pieces))
    names = (*hidden, FINAL)
    for number, group in enumerate(groups):
        # An interrupted group is completed from its start, since its texts are sampled together.
        first, done = min(done, len(group)), max(0, done - len(group))
        if first == len(group):
            continue
        prompts, texts = _completed(pair, [pieces[at] for at in group], group, config, number)
        for prompt, tokens, found in _with_states(pair, prompts[first:], texts[first:], names):
            if hidden and tokens:
                tokens = (*pair.target.prefix(prompt)[1:], *tokens)
            rows.append(tokens, None if found is None else found[-len(tokens) :])
            progress(len(rows.lengths), len(pieces))
    if int((rows.lengths > 0).sum()) < 2:
        raise PromptError(
            "the data has fewer than two texts to learn from: give more of them"
            + ("" if config.self_distill else ', with "target" for an encoder-decoder model')
        )
    return [pieces[number][0] for group in groups for number in group]


def batches(lengths: Sequence[int], size: int, seed: int, kinds: int = 1) -> list[list[int]]:
    """Group prompts of similar length into batches, and return their indices.

    The order is random, because batches of long prompts should not all come last. kinds: The number
    of sampling temperatures. Prompt i has temperature i modulo this number, so that most batches
    have a single temperature.
    """
    order = sorted(
        range(len(lengths)), key=lambda number: (number % kinds, lengths[number], number)
    )
    groups = [sorted(order[start : start + size]) for start in range(0, len(order), size)]
    random.Random(seed).shuffle(groups)
    return groups


def _pieces(pair: Pair, samples: Sequence[TrainingSample], config: DataConfig) -> Iterator[Piece]:
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


def _completed(
    pair: Pair, pieces: Sequence[Piece], group: Sequence[int], config: DataConfig, number: int
) -> tuple[list[Ids], list[Ids]]:
    """Return the prompts and completions of a group. number: The number of the group."""
    prompts, texts = [prompt for prompt, _ in pieces], [text for _, text in pieces]
    if config.self_distill:
        shared = pair.target.kind == "decoder-only"
        most = [config.length - shared * len(prompt) for prompt in prompts]
        kinds = config.temperatures
        heat = [kinds[at % len(kinds)] for at in group]
        texts = complete(pair, prompts, most, heat, config.seed + number)
    return prompts, texts


def _with_states(
    pair: Pair, prompts: Sequence[Ids], texts: Sequence[Ids], names: Sequence[str]
) -> Iterator[tuple[Ids, Ids, mx.array | None]]:
    """Yield each prompt and completion with the hidden states. A completion of a single token is
    replaced by an empty one, since nothing remains to be predicted after it."""
    used = [at for at, tokens in enumerate(texts) if len(tokens) > 1]
    found = states(pair, [prompts[at] for at in used], [texts[at] for at in used], names)
    for prompt, tokens in zip(prompts, texts, strict=True):
        yield (prompt, tokens, next(found)) if len(tokens) > 1 else (prompt, (), None)
