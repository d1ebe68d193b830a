"""The source of all random numbers. Keys are derived from (seed, prompt, purpose); there is no
global state.

There are two sources, because two kinds of rule need two kinds of noise:
- Coupled noise is one Gumbel vector per *position*, shared by draft and target. It does not depend
  on earlier drafts (Daliri, Musco, Suresh, arXiv 2408.07978), so the seed determines the output.
- Independent noise has disjoint keys per (round, position, purpose). A rule that has used the noise
  of a rejected token needs it: using the same key for that position again would not be exact."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..types import Noise

NOISE_ROWS, NOISE_NUMBERS = 8, 1 << 15
"""Coupled noise is drawn for NOISE_ROWS positions at once, or fewer if these would exceed
NOISE_NUMBERS random numbers. One MLX operation costs as much time as drawing a few thousand
numbers."""


def digest_of(prompt: Sequence[int]) -> str:
    """Return a digest of the prompt's token ids for keys; equal on every platform."""
    ids = np.asarray(prompt, dtype="<i8").tobytes()
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


def _hashed(seed: int, *path: int | str) -> int:
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def tossed(seed: int, digest: str, position: int, probability: float) -> bool:
    """Toss a coin for a position, counted from the first committed token. It decides whether XTC
    applies there. Draft and target share the toss. It only selects the distribution of the
    position, so every rule stays exact. digest: See `digest_of`."""
    return _hashed(seed, digest, "coin", position) < probability * 2**64


class SilentNoise(Noise):
    """The noise of one sequence at temperature 0, which is empty. One object serves all rounds."""

    def at(self, round: int, position: int) -> Noise:
        """Return the noise of a round. `position` is the output position of the round's first
        token, from 0; it never decreases."""
        return self


class _SeededNoise(SilentNoise):
    """Noise from keys that the seed and the prompt determine."""

    def __init__(self, seed: int, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        self._seed, self._vocabulary = seed, vocabulary
        self._digest = digest_of(prompt)
        self._round = self._position = 0

    def at(self, round: int, position: int) -> Noise:
        noise = copy(self)
        noise._round, noise._position = round, position
        return noise


class CoupledNoise(_SeededNoise):
    """Gumbel noise keyed by position alone. Each row is drawn once and cached until it is past. All
    rounds share the cache."""

    def __init__(self, seed: int, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        super().__init__(seed, vocabulary, prompt)
        self._rows = max(1, min(NOISE_ROWS, NOISE_NUMBERS // vocabulary))
        self._drawn: dict[int, mx.array] = {}

    def at(self, round: int, position: int) -> Noise:
        """See SilentNoise. Frees the noise of earlier positions."""
        for past in [first for first in self._drawn if first + self._rows <= position]:
            del self._drawn[past]
        return super().at(round, position)

    def draft(self, index: int) -> mx.array:
        return self._of(self._position + index, 1)[None]

    def target(self, count: int) -> mx.array:
        return self._of(self._position, count)[None]

    def _of(self, position: int, count: int) -> mx.array:
        """Return Gumbel noise of positions from `position` on, (count, vocabulary) float32."""
        end, parts = position + count, []
        for first in range(position - position % self._rows, end, self._rows):
            part = self._drawn.get(first)
            if part is None:
                part = self._drawn[first] = self._draw(first)
            parts.append(part[max(0, position - first) : end - first])
        return mx.concatenate(parts)

    def _draw(self, first: int) -> mx.array:
        positions = range(first, first + self._rows)
        hashes = [_hashed(self._seed, self._digest, "gumbel", index) for index in positions]
        # These are the keys that mx.random.key returns; vmap draws all rows in one operation.
        keys = mx.array([(hash >> 32, hash & 0xFFFFFFFF) for hash in hashes], dtype=mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel((self._vocabulary,), key=key))(keys)


class IndependentNoise(_SeededNoise):
    """Noise from disjoint keys per (round, position, purpose)."""

    def key(self, *path: int | str) -> mx.array:
        """Return the random key, (2,) uint32, of the use that `path` names; equal on every
        platform."""
        return mx.random.key(_hashed(self._seed, self._digest, *path))

    def draft(self, index: int) -> mx.array:
        return self._gumbel("draft", self._position + index)[None]

    def target(self, count: int) -> mx.array:
        raise TypeError("independent noise draws one correction, not every position of the target")

    def accept(self, count: int) -> mx.array:
        positions = range(self._position, self._position + count)
        keys = [self.key("accept", self._round, index) for index in positions]
        return mx.vmap(lambda key: mx.random.uniform(key=key))(mx.stack(keys))[None]

    def correction(self) -> mx.array:
        return self._gumbel("correction", self._position)

    def _gumbel(self, purpose: str, position: int) -> mx.array:
        """Return the Gumbel noise of a purpose, (1, vocabulary) float32."""
        key = self.key(purpose, self._round, position)
        return mx.random.gumbel((1, self._vocabulary), key=key)


def noise_of(rounds: Sequence[Noise]) -> Noise:
    """Combine the noise of sequences to the noise of their batch."""
    return rounds[0] if len(rounds) == 1 else _BatchNoise(rounds)


@dataclass(frozen=True)
class _BatchNoise(Noise):
    """The noise of a batch. Rows of sequences without noise are zero."""

    rounds: Sequence[Noise]

    def draft(self, index: int) -> mx.array | None:
        return _stacked([noise.draft(index) for noise in self.rounds])

    def target(self, count: int) -> mx.array | None:
        return _stacked([noise.target(count) for noise in self.rounds])

    def accept(self, count: int) -> mx.array | None:
        return _stacked([noise.accept(count) for noise in self.rounds])

    def correction(self) -> mx.array | None:
        return _stacked([noise.correction() for noise in self.rounds])

    def of(self, sequence: int) -> Noise:
        return self.rounds[sequence]


def _stacked(rows: Sequence[mx.array | None]) -> mx.array | None:
    drawn = next((row for row in rows if row is not None), None)
    if drawn is None:
        return None
    return mx.concatenate([mx.zeros_like(drawn) if row is None else row for row in rows])
