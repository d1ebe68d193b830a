"""Hidden states and the tokens after them, on disk: written sample by sample, read row by row.

A sample is there once its length is written, after its contents; what
an interruption leaves behind that is cut off when the rows are opened again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

_RAW = {2: (np.uint16, mx.uint16), 4: (np.uint32, mx.uint32)}
"""numpy has no bfloat16: states are kept as integers of the same bits."""


class Rows:
    """states.bin: (rows, width) of `dtype`. tokens.bin: (rows,) int32, the token after each state.
    lengths.bin: (samples,) int32, rows of each; 0 for one that was of no use."""

    def __init__(self, directory: Path, width: int, dtype: mx.Dtype) -> None:
        self._width = width
        self._dtype = dtype
        self._raw, self._view = _RAW[dtype.size]
        names = ("states.bin", "tokens.bin", "lengths.bin")
        self._states, self._tokens, self._lengths = (directory / name for name in names)
        for file in (self._states, self._tokens, self._lengths):
            file.touch()
        _cut(self._lengths, self._lengths.stat().st_size // 4 * 4)
        rows = int(self.lengths.sum())
        _cut(self._tokens, rows * 4)
        _cut(self._states, rows * width * dtype.size)

    @property
    def lengths(self) -> np.ndarray:
        """(samples,) int32."""
        return np.fromfile(self._lengths, np.int32)

    def append(self, tokens: Sequence[int], states: mx.array | None) -> None:
        """One sample: states (len(tokens), width), row j predicting token j; None if no tokens."""
        if states is not None:
            _append(self._states, np.array(states.astype(self._dtype).view(self._view)))
            _append(self._tokens, np.array(tokens, np.int32))
        _append(self._lengths, np.array([len(tokens)], np.int32))

    def states(self, rows: np.ndarray) -> mx.array:
        """(n, width) of these rows; only they are read."""
        every = np.memmap(self._states, self._raw, "r").reshape(-1, self._width)
        return mx.array(np.ascontiguousarray(every[rows])).view(self._dtype)

    def targets(self, count: int) -> np.ndarray:
        """(rows, count) int32: for head i the token i + 1 places after the one that a row predicts,
        -1 behind the end of a sample."""
        tokens, lengths = self.tokens(), self.lengths
        ends = np.repeat(np.cumsum(lengths), lengths)
        places = np.arange(len(tokens))[:, None] + 1 + np.arange(count)
        following = tokens[np.minimum(places, max(len(tokens) - 1, 0))]
        return np.where(places < ends[:, None], following, -1).astype(np.int32)

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """Numbers of the samples with tokens to learn from, and of those held out: the last ones,
        at least one, with that share of them or less."""
        used = np.flatnonzero(self.lengths)
        held = max(1, int(share * len(used)))
        return used[:-held], used[-held:]

    @property
    def starts(self) -> np.ndarray:
        """(samples,) int64: the first row of each."""
        lengths = self.lengths.astype(np.int64)
        return np.cumsum(lengths) - lengths

    def tokens(self) -> np.ndarray:
        """(rows,) int32: the token after each."""
        return np.fromfile(self._tokens, np.int32)

    def texts(self) -> list[list[int]]:
        """The tokens of every sample."""
        return [part.tolist() for part in np.split(self.tokens(), self.starts[1:])]


def _append(file: Path, values: np.ndarray) -> None:
    with file.open("ab") as stream:
        stream.write(values.tobytes())


def _cut(file: Path, nbytes: int) -> None:
    with file.open("r+b") as stream:
        stream.truncate(nbytes)
