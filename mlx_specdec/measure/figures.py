"""Computes the figures of a benchmark's methods from samples, with confidence intervals.

The bootstrap is paired: it resamples prompts, each with its samples of both compared methods."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..decoding.statistics import ratio
from .margins import Compare
from .methods import Key, Length, Measurements, Method, Sample
from .presentation import Value, figure, same_text

DRAWS = 2000
"""Number of bootstrap resamples."""
COVERAGE = 0.95
FEWEST = 5
"""Minimum number of sequences for an interval. A bootstrap of fewer says little."""


class Paired(NamedTuple):
    """One sequence by plain decoding and by another method. Seconds are medians of the repeats."""

    plain_seconds: float
    seconds: float
    plain_tokens: int
    tokens: int


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of tokens per second to plain decoding: for all sequences together, and the median
    of the ratios of the sequences."""

    overall: Value
    per_text: Value


def speed_up(texts: Sequence[Paired], draws: int = DRAWS, seed: int = 0) -> SpeedUp | None:
    """Return the speedup with an interval by a percentile bootstrap over the sequences (Efron), or
    None if no sequence took any time."""
    texts = [text for text in texts if min(text) > 0]
    if not texts:
        return None
    count = len(texts)
    plain_seconds, seconds, plain_tokens, tokens = np.array(texts, dtype=float).T
    drawn = np.random.default_rng(seed).integers(0, count, (draws, count))
    # Row 0 holds the measured sequences, and the other rows the resamples.
    drawn = np.concatenate([np.arange(count)[None], drawn])
    speed, plain_speed = (
        made[drawn].sum(axis=1) / took[drawn].sum(axis=1)
        for made, took in ((tokens, seconds), (plain_tokens, plain_seconds))
    )
    ratios = (tokens / seconds) / (plain_tokens / plain_seconds)
    per_text = np.median(ratios[drawn], axis=1)
    return SpeedUp(_value(speed / plain_speed, count), _value(per_text, count))


def _value(ratios: NDArray[np.float64], count: int) -> Value:
    """Return the figure of `count` sequences from the measured ratio and the resampled ones."""
    if count < FEWEST:
        return Value(float(ratios[0]))
    tail = (1 - COVERAGE) / 2 * 100
    return Value(float(ratios[0]), *np.percentile(ratios[1:], [tail, 100 - tail]).tolist())


@dataclass(frozen=True)
class RoundParts:
    """The mean times of a round in seconds. `other` is the time that is spent in neither model."""

    draft: float
    verify: float
    other: float


@dataclass(frozen=True)
class Difference:
    """An output that should equal the output of plain decoding, but does not. `Parting` explains
    position, margin and tie."""

    prompt: int
    turn: int
    position: int
    margin: float | None
    tie: bool | None


@dataclass(frozen=True)
class Figures:
    """The figures of one method.

    Attributes:
        same_text: Whether the outputs should equal the outputs of plain decoding.
        texts: The number of sequences.
        by_category: The speedups for the prompts of each category.
        acceptance: Entry i - 1 is a_i, the share of rounds that accepted the first i draft tokens.
        predicted: S(num_draft).
        compared: The number of outputs that should equal the outputs of plain decoding.
        differences: The outputs that do not.
    """

    name: str
    family: str
    num_draft: Length
    same_text: bool
    texts: int
    tokens_per_second: float | None
    speed_up: SpeedUp | None
    by_category: Mapping[str, SpeedUp]
    tokens_per_round: float | None
    acceptance_rate: float | None
    acceptance: tuple[float, ...]
    parts: RoundParts | None
    predicted: float | None
    compared: int
    differences: tuple[Difference, ...]

    @property
    def gain(self) -> float:
        """The speedup over all sequences, or 0 if there is none."""
        return self.speed_up.overall.value if self.speed_up else 0.0

    def cells(self) -> dict[str, str]:
        """Return the row of the table, by column."""
        is_plain = self.family == "plain"
        gained = None if is_plain else self.speed_up
        speed = "1" if is_plain else ""
        return {
            "method": self.name,
            "tokens/s": figure(self.tokens_per_second, ".1f"),
            "speedup": f"{gained.overall.value:.2f}" if gained else speed,
            "95 % interval": gained.overall.interval if gained else "",
            "median sequence": f"{gained.per_text.value:.2f}" if gained else "",
            "predicted": figure(self.predicted, ".2f"),
            "acceptance length": figure(self.tokens_per_round, ".2f"),
            "acceptance rate": figure(self.acceptance_rate, ".0%"),
            "same text": "" if is_plain else same_text(self.compared, self.differences),
        }


def figures_of(
    measured: Measurements,
    method: Method,
    predictions: Mapping[str, Sequence[float]],
    compare: Compare,
) -> Figures:
    """Return the figures of a method. `predictions` are the speedups by proposer and draft length,
    and `compare` finds where and why an output differs from the output of plain decoding."""
    samples = measured.samples[method.name]
    stats = [sample.stats for sample in samples.values() if sample.stats is not None]
    predicted = dict[Length, float](enumerate(predictions.get(method.family, ()), start=1))
    categories = dict.fromkeys(c.category for c in measured.cases if c.category is not None)
    ratios = {name: speed_up(_paired(measured, method, name)) for name in categories}
    differences = []
    for (index, repeat), sample in sorted(samples.items()) if method.same_text else ():
        plain = measured.plain.get((index, repeat))
        if plain is not None and plain.tokens != sample.tokens:
            parting = compare(measured.prompts[index], plain.tokens, sample.tokens)
            case = measured.cases[index]
            differences.append(Difference(case.prompt, case.turn, **vars(parting)))
    return Figures(
        name=method.name,
        family=method.family,
        num_draft=method.num_draft,
        same_text=method.same_text,
        texts=len({case for case, _ in samples}),
        tokens_per_second=tokens_per_second(samples),
        speed_up=speed_up(_paired(measured, method)),
        by_category={name: found for name, found in ratios.items() if found is not None},
        tokens_per_round=tokens_per_round(samples.values()),
        acceptance_rate=ratio(sum(s.accepted for s in stats), sum(s.drafted for s in stats)),
        acceptance=acceptance_by_position(samples.values()),
        parts=round_parts(measured, method),
        predicted=predicted.get(method.num_draft),
        compared=len(samples) if method.same_text else 0,
        differences=tuple(differences),
    )


def acceptance_by_position(samples: Iterable[Sample]) -> tuple[float, ...]:
    """Return a_i for i = 1, 2, ... over all rounds with at least i draft tokens."""
    stats = [sample.stats for sample in samples if sample.stats is not None]
    drafted = zip_longest(*(entry.drafted_by_position for entry in stats), fillvalue=0)
    accepted = zip_longest(*(entry.accepted_by_position for entry in stats), fillvalue=0)
    totals = zip(map(sum, accepted), map(sum, drafted), strict=True)
    return tuple(part / count for part, count in totals if count)


def tokens_per_round(samples: Iterable[Sample]) -> float | None:
    """Return the acceptance length over the samples whose rounds were counted."""
    counts = [(sample.counted, sample.rounds) for sample in samples if sample.rounds]
    return ratio(sum(tokens for tokens, _ in counts), sum(rounds for _, rounds in counts))


def tokens_per_second(samples: Mapping[Key, Sample]) -> float | None:
    """Return the tokens per second of all sequences, with the median time of the repeats."""
    texts = [[samples[key] for key in keys] for keys in _by_case(samples)]
    seconds = sum(median(sample.seconds for sample in repeats) for repeats in texts)
    return ratio(sum(repeats[0].counted for repeats in texts), seconds)


def _by_case(keys: Iterable[Key]) -> list[list[Key]]:
    return [list(repeats) for _, repeats in groupby(sorted(keys), key=itemgetter(0))]


def _paired(measured: Measurements, method: Method, category: str | None = None) -> list[Paired]:
    """Pair the repeats of each case in which both plain decoding and the method ran."""
    plain, samples = measured.plain, measured.samples[method.name]
    return [
        Paired(
            median(plain[key].seconds for key in keys),
            median(samples[key].seconds for key in keys),
            plain[keys[0]].counted,
            samples[keys[0]].counted,
        )
        for keys in _by_case(plain.keys() & samples.keys())
        if category in (None, measured.cases[keys[0][0]].category)
    ]


def round_parts(measured: Measurements, method: Method) -> RoundParts | None:
    """Return the mean times of the method's rounds that were timed in parts, if any were."""
    samples = measured.parts.get(method.name, {}).values()
    stats = [sample.stats for sample in samples if sample.stats is not None]
    seconds = [[s.seconds.draft or 0, s.seconds.verify or 0, s.seconds.other or 0] for s in stats]
    rounds = sum(entry.rounds for entry in stats)
    return RoundParts(*(np.sum(seconds, axis=0) / rounds).tolist()) if rounds else None
