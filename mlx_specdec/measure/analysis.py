"""Computes the speedups, with confidence intervals, and other figures of a benchmark's methods.

The bootstrap is paired: it resamples prompts, each with its samples of both compared methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .margins import Compare, Parting, find_parting
from .methods import Case, Key, Length, Measurements, Method, Sample
from .passes import PassCosts
from .prediction import Cluster, RoundCost, break_even, speedups

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
class Value:
    """A figure and its 95 % confidence interval, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval as text, or an empty string if there is none."""
        none = self.low is None or self.high is None
        return "" if none else f"{self.low:.2f} to {self.high:.2f}"


@dataclass(frozen=True)
class SpeedUp:
    """The ratio of tokens per second to plain decoding.

    Attributes:
        overall: The ratio for all sequences together.
        per_text: The median of the ratios of the sequences.
    """

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
    value = float(ratios[0])
    if count < FEWEST:
        return Value(value)
    tail = (1 - COVERAGE) / 2 * 100
    low, high = np.percentile(ratios[1:], [tail, 100 - tail])
    return Value(value, float(low), float(high))


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


@dataclass(frozen=True)
class Gain:
    """A method's speedup over plain decoding.

    Attributes:
        speed_up, alone: The speedups on the cluster and on one machine.
        break_even_us: The time of an exchange, in microseconds, above which speculation gains more
            on the cluster than on one machine; None if it never does.
    """

    name: str
    speed_up: float
    alone: float
    break_even_us: float | None


@dataclass(frozen=True)
class ClusterFigures:
    """The speedups on machines that share a target, compared with one machine.

    Attributes:
        machines, mode, exchanges, share: See `prediction.Cluster`.
        exchange_us: The time of one exchange in microseconds, by the number of tokens in the pass.
        network_ms: The network time of a plain step, in milliseconds.
        gains: The speedups of the methods whose rounds were timed in parts.
    """

    machines: int
    mode: str
    exchanges: int
    exchange_us: Mapping[int, float]
    share: float
    network_ms: float
    gains: Sequence[Gain]


@dataclass(frozen=True)
class Analysis:
    """The figures of all methods.

    Attributes:
        plain_step: The seconds of a token in plain decoding.
        predictions: S(gamma) for gamma = 1, 2, ..., by proposer.
        costs: The times of passes, which were measured between the sequences.
        skipped: Why cases were skipped, by their number.
    """

    methods: tuple[Figures, ...]
    plain_step: float
    predictions: Mapping[str, tuple[float, ...]]
    costs: PassCosts | None
    texts: int
    repeats: int
    skipped: Mapping[int, str]
    interrupted: bool
    cluster: ClusterFigures | None = None


def analyse(
    measured: Measurements, costs: PassCosts | None, compare: Compare = find_parting
) -> Analysis | None:
    """Return all figures, or None if plain decoding has no sample.

    Args:
        measured: The samples.
        costs: The times of passes, if they were measured.
        compare: Finds where and why an output differs from the output of plain decoding.
    """
    if (speed := _tokens_per_second(measured.plain)) is None:
        return None
    step = 1 / speed
    predictions = _predictions(measured, costs, step)
    return Analysis(
        methods=tuple(
            _figures(measured, method, predictions, compare) for method in measured.methods
        ),
        plain_step=step,
        predictions=predictions,
        costs=costs,
        texts=len({case for case, _ in measured.plain}),
        repeats=1 + max(repeat for _, repeat in measured.plain),
        skipped=measured.skipped,
        interrupted=measured.interrupted,
    )


def overall(figures: Figures) -> float:
    """Return a method's speedup over all sequences, or 0 if there is none."""
    return figures.speed_up.overall.value if figures.speed_up else 0.0


def fastest(methods: Iterable[Figures]) -> Figures | None:
    """Return the method with the highest speedup, if any has one."""
    return max((method for method in methods if method.speed_up), key=overall, default=None)


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
    return _ratio(sum(tokens for tokens, _ in counts), sum(rounds for _, rounds in counts))


def difference(case: Case, parting: Parting) -> Difference:
    return Difference(case.prompt, case.turn, parting.position, parting.margin, parting.tie)


def _predictions(
    measured: Measurements, costs: PassCosts | None, step: float
) -> dict[str, tuple[float, ...]]:
    """Return S(gamma) of the draft model by gamma. Lookup is not predicted, because its hits are
    unknown."""
    fixed = [m for m in measured.methods if m.family == "draft" and m.num_draft != "auto"]
    if costs is None or costs.draft is None or not fixed:
        return {}
    samples = [sample for method in fixed for sample in measured.samples[method.name].values()]
    rests = [parts.other for method in fixed if (parts := _round_parts(measured, method))]
    cost = costs.in_steps(step, sum(rests) / len(rests) if rests else 0.0)
    lengths = [sample.counted for sample in measured.plain.values()]
    gains = speedups(cost, acceptance_by_position(samples), lengths)
    return {"draft": gains[1:]} if gains[1:] else {}


def _figures(
    measured: Measurements,
    method: Method,
    predictions: Mapping[str, Sequence[float]],
    compare: Compare,
) -> Figures:
    samples = measured.samples[method.name]
    stats = [sample.stats for sample in samples.values() if sample.stats is not None]
    length, promised = method.num_draft, predictions.get(method.family, ())
    categories = dict.fromkeys(
        case.category for case in measured.cases if case.category is not None
    )
    ratios = {name: speed_up(_paired(measured, method, name)) for name in categories}
    return Figures(
        name=method.name,
        family=method.family,
        num_draft=length,
        same_text=method.same_text,
        texts=len({case for case, _ in samples}),
        tokens_per_second=_tokens_per_second(samples),
        speed_up=speed_up(_paired(measured, method)),
        by_category={name: ratio for name, ratio in ratios.items() if ratio is not None},
        tokens_per_round=tokens_per_round(samples.values()),
        acceptance_rate=_ratio(
            sum(entry.accepted for entry in stats), sum(entry.drafted for entry in stats)
        ),
        acceptance=acceptance_by_position(samples.values()),
        parts=_round_parts(measured, method),
        predicted=dict(enumerate(promised, start=1)).get(length) if length != "auto" else None,
        compared=len(samples) if method.same_text else 0,
        differences=tuple(
            difference(
                measured.cases[key[0]],
                compare(measured.prompts[key[0]], plain.tokens, sample.tokens),
            )
            for key, sample in sorted(samples.items())
            if method.same_text and (plain := measured.plain.get(key)) is not None
            if plain.tokens != sample.tokens
        ),
    )


def _tokens_per_second(samples: Mapping[Key, Sample]) -> float | None:
    """Return the tokens per second of all sequences, with the median time of the repeats."""
    texts = [[samples[key] for key in keys] for keys in _by_case(samples)]
    seconds = sum(median(sample.seconds for sample in repeats) for repeats in texts)
    return _ratio(sum(repeats[0].counted for repeats in texts), seconds)


def _by_case(keys: Iterable[Key]) -> list[list[Key]]:
    return [list(repeats) for _, repeats in groupby(sorted(keys), key=itemgetter(0))]


def _paired(measured: Measurements, method: Method, category: str | None = None) -> list[Paired]:
    """Pair the repeats of each case in which both plain decoding and the method ran."""
    plain, samples = measured.plain, measured.samples[method.name]
    pairs = []
    for keys in _by_case(plain.keys() & samples.keys()):
        first = keys[0]
        if category in (None, measured.cases[first[0]].category):
            plain_seconds = median(plain[key].seconds for key in keys)
            seconds = median(samples[key].seconds for key in keys)
            counted = plain[first].counted, samples[first].counted
            pairs.append(Paired(plain_seconds, seconds, *counted))
    return pairs


def _round_parts(measured: Measurements, method: Method) -> RoundParts | None:
    samples = measured.parts.get(method.name, {}).values()
    stats = [sample.stats for sample in samples if sample.stats is not None]
    rounds = sum(entry.rounds for entry in stats)
    if not rounds:
        return None
    parts = ([getattr(s.seconds, name) for s in stats] for name in ("draft", "verify", "other"))
    return RoundParts(*(sum(seconds) / rounds for seconds in parts))


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None


def of_cluster(
    analysis: Analysis, cluster: Cluster, exchange_seconds: Mapping[int, float]
) -> ClusterFigures:
    """Return the speedups on machines that share a target, compared with one machine. The times of
    one machine are computed by subtracting the time of the network.

    Args:
        analysis: The figures of a benchmark on the cluster.
        cluster: The machines.
        exchange_seconds: The time of one exchange, by the number of tokens in the pass.
    """
    network = cluster.exchanges * exchange_seconds[1]
    local_step, gains = analysis.plain_step - network, []
    step = local_step / cluster.share
    for method in analysis.methods:
        parts, tokens, drafted = method.parts, method.tokens_per_round, method.num_draft
        if parts is None or tokens is None or drafted == "auto":
            continue
        paid = cluster.exchanges * exchange_seconds.get(drafted + 1, math.inf)
        if local_step <= 0 or parts.verify <= paid:
            continue  # The times are unknown or contradict one another.
        cost = RoundCost(
            draft=(parts.draft + parts.other) / step,
            passes={1: 1.0, 2: (parts.verify - paid) / local_step},
        )
        # All draft tokens of a round count as one, since they were timed together.
        acceptance = (tokens - 1,)
        even = break_even(cost, cluster.share, acceptance)
        gain = Gain(
            name=method.name,
            speed_up=overall(method),
            alone=tokens / cost.of(acceptance),
            break_even_us=None if even is None else 1e6 * even * step / cluster.exchanges,
        )
        gains.append(gain)
    return ClusterFigures(
        machines=cluster.machines,
        mode=cluster.mode,
        exchanges=cluster.exchanges,
        exchange_us={rows: 1e6 * seconds for rows, seconds in exchange_seconds.items()},
        share=cluster.share,
        network_ms=1000 * network,
        gains=gains,
    )
