"""Where every random number comes from: keys derived from (seed, prompt, purpose), no global state.

Two sources, because two kinds of rule need two kinds of noise:
- coupled: one Gumbel vector per *position*, shared by draft and target, the same whatever was
  drafted before (Daliri, Musco, Suresh, arXiv 2408.07978). The text then depends on the seed alone.
- independent: disjoint keys per (round, position, purpose). Rules whose verdict has already used a
  discarded draft need it: drawing that position again from the same key would not be exact."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from ..interfaces import Noise, NoiseSource

ROWS, NUMBERS = 8, 1 << 15
"""Coupled noise is drawn so many rows at a time, if they are no more numbers: an operation costs as
much as a few thousand of these. Every position is needed once, so that none is drawn in vain."""


def digest_of(prompt: Sequence[int]) -> str:
    """What stands for a prompt's token ids in keys; equal on every platform."""
    ids = np.asarray(prompt, dtype="<i8").tobytes()
    return hashlib.blake2b(ids, digest_size=16).hexdigest()


def derive_key(seed: int, *path: int | str) -> mx.array:
    """A random key, (2,) uint32, for one use: `path` says which. Equal on every platform."""
    return mx.random.key(_hashed(seed, *path))


def _hashed(seed: int, *path: int | str) -> int:
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class Coins:
    """One toss for each position of a sequence, the same for draft and target: it only says which
    distribution the position has, so that every rule stays exact."""

    def __init__(self, seed: int, prompt: Sequence[int], probability: float) -> None:
        self._seed = seed
        self._digest = digest_of(prompt)
        self._below = probability * 2**64

    def at(self, position: int) -> bool:
        """Whether the toss of a position, counted from the first committed token, says yes."""
        return _hashed(self._seed, self._digest, "coin", position) < self._below


class SilentNoise(NoiseSource):
    """Temperature 0: nothing is drawn, so one object serves every round."""

    def at(self, round: int, position: int) -> SilentNoise:
        return self

    def draft(self, index: int) -> None:
        return None

    def target(self, count: int) -> None:
        return None

    def accept(self, count: int) -> None:
        return None

    def correction(self) -> None:
        return None

    def of(self, sequence: int) -> SilentNoise:
        return self


class CoupledNoise(NoiseSource):
    """Gumbel noise keyed by position alone, drawn once and cached while it may be needed."""

    def __init__(self, seed: int, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        self._seed = seed
        self._digest = digest_of(prompt)
        self._vocabulary = vocabulary
        self._rows = max(1, min(ROWS, NUMBERS // vocabulary))
        self._drawn: dict[int, mx.array] = {}
        self._needed = 0

    def at(self, round: int, position: int) -> _CoupledRound:
        """Noise from `position` on; that of earlier positions is dropped."""
        for before in [first for first in self._drawn if first + self._rows <= position]:
            del self._drawn[before]
        return _CoupledRound(self, position)

    def rows(self, position: int, count: int) -> mx.array:
        """(count, vocabulary) float32, the Gumbel noise of output positions from `position` on."""
        end, parts = position + count, []
        # The next round begins at the end of this one at the latest.
        self._needed = max(self._needed, end + count)
        for first in range(position - position % self._rows, end, self._rows):
            part = self._drawn.get(first)
            if part is None:
                part = self._drawn[first] = self._draw(first)
            parts.append(part[max(0, position - first) : end - first])
        return mx.concatenate(parts)

    def draw_ahead(self) -> None:
        """See NoiseSource; every position is needed once, so that little is drawn in vain."""
        first = max(self._drawn, default=self._needed) + self._rows
        while first < self._needed:
            self._drawn[first] = self._draw(first)
            mx.async_eval(self._drawn[first])
            first += self._rows

    def _draw(self, first: int) -> mx.array:
        positions = range(first, first + self._rows)
        hashes = [_hashed(self._seed, self._digest, "gumbel", each) for each in positions]
        if len(hashes) == 1:
            return mx.random.gumbel((1, self._vocabulary), key=mx.random.key(hashes[0]))
        # As mx.random.key makes them; all rows in as few operations as one.
        keys = mx.array([(each >> 32, each & 0xFFFFFFFF) for each in hashes], dtype=mx.uint32)
        return mx.vmap(lambda key: mx.random.gumbel((self._vocabulary,), key=key))(keys)


class _CoupledRound:
    def __init__(self, source: CoupledNoise, position: int) -> None:
        self._source = source
        self._position = position

    def draft(self, index: int) -> mx.array:
        return self._source.rows(self._position + index, 1)[None]

    def target(self, count: int) -> mx.array:
        return self._source.rows(self._position, count)[None]

    def accept(self, count: int) -> mx.array:
        raise TypeError("coupled noise has no acceptance uniforms: its rule compares tokens")

    def correction(self) -> mx.array:
        return self._source.rows(self._position, 1)

    def of(self, sequence: int) -> _CoupledRound:
        return self


class IndependentNoise(NoiseSource):
    """Noise from disjoint keys per (round, position, purpose)."""

    def __init__(self, seed: int, vocabulary: int, prompt: Sequence[int] = ()) -> None:
        self._seed = seed
        self._digest = digest_of(prompt)
        self._vocabulary = vocabulary

    def at(self, round: int, position: int) -> _IndependentRound:
        return _IndependentRound(self, round, position)

    def key(self, *path: int | str) -> mx.array:
        return derive_key(self._seed, self._digest, *path)

    def gumbel(self, *path: int | str) -> mx.array:
        """(vocabulary,) float32 Gumbel noise for one use."""
        return mx.random.gumbel((self._vocabulary,), key=self.key(*path))


class _IndependentRound:
    def __init__(self, source: IndependentNoise, round: int, position: int) -> None:
        self._source = source
        self._round = round
        self._position = position

    def draft(self, index: int) -> mx.array:
        return self._source.gumbel("draft", self._round, self._position + index)[None, None]

    def target(self, count: int) -> mx.array:
        raise TypeError("independent noise draws one correction, not every position of the target")

    def accept(self, count: int) -> mx.array:
        positions = range(self._position, self._position + count)
        keys = [self._source.key("accept", self._round, each) for each in positions]
        return mx.vmap(lambda key: mx.random.uniform(key=key))(mx.stack(keys))[None]

    def correction(self) -> mx.array:
        return self._source.gumbel("correction", self._round, self._position)[None]

    def of(self, sequence: int) -> _IndependentRound:
        return self


def noise_of(rounds: Sequence[Noise]) -> Noise:
    """The noise of a batch from that of its sequences."""
    return rounds[0] if len(rounds) == 1 else _BatchNoise(rounds)


class _BatchNoise:
    """One row per sequence; those that draw nothing have zeros where others draw."""

    def __init__(self, rounds: Sequence[Noise]) -> None:
        self._rounds = rounds

    def draft(self, index: int) -> mx.array | None:
        return _stacked([noise.draft(index) for noise in self._rounds])

    def target(self, count: int) -> mx.array | None:
        return _stacked([noise.target(count) for noise in self._rounds])

    def accept(self, count: int) -> mx.array | None:
        return _stacked([noise.accept(count) for noise in self._rounds])

    def correction(self) -> mx.array | None:
        return _stacked([noise.correction() for noise in self._rounds])

    def of(self, sequence: int) -> Noise:
        return self._rounds[sequence]


def _stacked(rows: Sequence[mx.array | None]) -> mx.array | None:
    drawn = next((row for row in rows if row is not None), None)
    if drawn is None:
        return None
    return mx.concatenate([mx.zeros_like(drawn) if row is None else row for row in rows])
