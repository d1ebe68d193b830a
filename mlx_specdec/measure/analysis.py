"""Computes and presents the figures of single completions by several methods."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

from .figures import Figures, acceptance_by_position, figures_of, round_parts, tokens_per_second
from .margins import Compare, find_parting
from .methods import Measurements
from .passes import PassCosts
from .prediction import speedups
from .presentation import Bars, ChartBar, Lines, Presentation, Series, Table, Value, fastest

PARTS = ("draft", "verify", "other")
COUNTS = (
    "one counts with the median of its repeats, without its prompt pass. Intervals by bootstrap "
    "over sequences, from five on"
)


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

    def presentation(self) -> Presentation:
        """Return what the terminal and the report show."""
        drafting = [method for method in self.methods if method.acceptance_rate is not None]
        best, compared = fastest(drafting), sum(method.compared for method in drafting)
        drawn = [draw(self) for draw in (_speedup, _acceptance, _parts, _costs, _categories)]
        return Presentation(
            title="what speculation gains",
            counts=COUNTS,
            unit="Tokens per second over plain decoding",
            table=Table.of(self.methods),
            verdict=self._verdict(),
            bars=self._bars(),
            charts=[chart for chart in drawn if chart.drawn],
            gain=best.gain if best is not None and best.gain > 1 else None,
            compared=compared,
            same=compared - sum(len(method.differences) for method in drafting),
        )

    def _verdict(self) -> str:
        best = fastest(self.methods[1:])
        if best is None:
            return ""
        if best.gain <= 1:
            return (
                f"Nothing is faster than plain decoding; {best.name} comes closest with "
                f"{best.gain:.2f} of its speed."
            )
        auto = fastest(method for method in self.methods if method.num_draft == "auto")
        text = f"{best.name} is fastest: {best.gain:.2f} times plain decoding"
        if auto is not None and auto is not best:
            text += f"; {auto.name} reaches {auto.gain / best.gain:.2f} of it"
        return text + "."

    def _bars(self) -> list[tuple[str, float, str]]:
        """Return bars for plain decoding, and for the best fixed draft length and the automatic
        draft length of each family."""
        chosen: dict[object, tuple[float, str]] = {}
        for method in self.methods:
            value = 1.0 if method.family == "plain" else method.gain
            key = method.family, method.num_draft == "auto"
            chosen[key] = max(chosen.get(key, (0.0, "")), (value, method.name))
        return [(name, value, f"{value:.2f} ×") for value, name in chosen.values()]

    def fixed(self) -> Iterator[tuple[str, list[Figures]]]:
        """Yield the methods with a fixed draft length by family."""
        for family in dict.fromkeys(method.family for method in self.methods):
            methods = [method for method in self.methods if method.family == family]
            methods = [method for method in methods if method.num_draft not in (0, "auto")]
            if methods:
                yield family, methods


def analyse(
    measured: Measurements, costs: PassCosts | None, compare: Compare = find_parting
) -> Analysis | None:
    """Return all figures, or None if plain decoding has no sample. `costs` are the times of passes,
    if they were measured. `compare` finds where and why an output differs from plain decoding."""
    if (speed := tokens_per_second(measured.plain)) is None:
        return None
    step = 1 / speed
    predictions = _predictions(measured, costs, step)
    return Analysis(
        methods=tuple(figures_of(measured, m, predictions, compare) for m in measured.methods),
        plain_step=step,
        predictions=predictions,
        costs=costs,
        texts=len({case for case, _ in measured.plain}),
        repeats=1 + max(repeat for _, repeat in measured.plain),
        skipped=measured.skipped,
        interrupted=measured.interrupted,
    )


def _predictions(
    measured: Measurements, costs: PassCosts | None, step: float
) -> dict[str, tuple[float, ...]]:
    """Return S(gamma) of the draft model by gamma. Lookup is not predicted, because its hits are
    unknown."""
    fixed = [m for m in measured.methods if m.family == "draft" and m.num_draft != "auto"]
    if costs is None or costs.draft is None or not fixed:
        return {}
    samples = [sample for method in fixed for sample in measured.samples[method.name].values()]
    rests = [parts.other for method in fixed if (parts := round_parts(measured, method))]
    cost = costs.in_steps(step, sum(rests) / len(rests) if rests else 0.0)
    lengths = [sample.counted for sample in measured.plain.values()]
    gains = speedups(cost, acceptance_by_position(samples), lengths)
    return {"draft": gains[1:]} if gains[1:] else {}


def _speedup(analysis: Analysis) -> Lines:
    series = []
    for family, methods in analysis.fixed():
        points = [(int(m.num_draft), m.speed_up.overall) for m in methods if m.speed_up]
        series.append(Series(family, family, points))
    for family, speeds in analysis.predictions.items():
        points = list(enumerate(map(Value, speeds), start=1))
        series.append(Series(f"{family}, predicted", family, points, dashed=True))
    text = "Tokens per second over plain decoding's (the line at 1), with 95 % intervals."
    if analysis.predictions:
        text += " Dashed: S(γ), from acceptance, the lengths of the sequences and the costs below."
    learned = [m for m in analysis.methods if m.num_draft == "auto" and m.speed_up]
    if learned:
        ratios = ", ".join(f"{method.name}: {method.gain:.2f}" for method in learned)
        text += f" Chosen while decoding: {ratios}."
    axes = ("tokens drafted a round", "speedup")
    return Lines("Speedup by draft length", text, axes, series)


def _acceptance(analysis: Analysis) -> Lines:
    series = []
    for family, methods in analysis.fixed():
        longest = max(methods, key=lambda method: len(method.acceptance))
        shares = map(Value, longest.acceptance)
        series.append(Series(longest.name, family, list(enumerate(shares, start=1))))
    text = "Share of rounds in which this drafted token and all before it were accepted."
    axes = ("position in the draft", "share")
    return Lines("Acceptance by position", text, axes, series, top=1.0)


def _parts(analysis: Analysis) -> Bars:
    bars = [
        ChartBar(method.name, [(part, part, vars(method.parts)[part] * 1e3) for part in PARTS])
        for method in analysis.methods
        if method.parts is not None
    ]
    text = (
        "Milliseconds of an average round, all rounds timed in parts: drafting, the target's pass, "
        f"and everything else. A plain step takes {analysis.plain_step * 1e3:.2f} ms."
    )
    legend = [Series(part, part, ()) for part in PARTS]
    return Bars("Where a round's time goes", text, bars, " ms", legend)


def _costs(analysis: Analysis) -> Lines:
    costs, step = analysis.costs or PassCosts(None, {}), analysis.plain_step
    measured = [(m, Value(seconds / step)) for m, seconds in sorted(costs.passes.items())]
    rounds = [
        (method.num_draft + 1, Value(method.parts.verify / step))
        for method in analysis.methods
        if method.parts is not None and method.family == "draft" and method.num_draft != "auto"
    ]
    series = [
        Series("target pass, measured between sequences", "verify", measured),
        Series("within rounds", "other", sorted(rounds, key=itemgetter(0))),
    ]
    text = "V(m): a pass of the target over m tokens, in plain steps."
    if costs.draft is not None:
        text += f" A draft step costs c = {costs.draft / step:.2f}."
    return Lines("What a pass costs", text, ("tokens in the pass", "plain steps"), series)


def _categories(analysis: Analysis) -> Bars:
    shown = [best for _, methods in analysis.fixed() if (best := fastest(methods)) is not None]
    shown += [method for method in analysis.methods if method.num_draft == "auto"]
    bars = [
        ChartBar(method.name, [("", method.family, ratio.value)], ratio.interval, category)
        for category in dict.fromkeys(name for method in shown for name in method.by_category)
        for method in shown
        if category in method.by_category and (ratio := method.by_category[category].overall)
    ]
    text = (
        "Tokens per second over plain decoding's, with 95 % intervals from 5 sequences on, of each "
        "proposer's and program's best length and of what was chosen while decoding."
    )
    return Bars("By category of prompts", text, bars)
