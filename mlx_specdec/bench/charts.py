"""The charts of a report, with a legend; where there is nothing to show, none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from .analysis import Analysis, Figures, fastest, overall
from .bootstrap import Estimate
from .drawing import Bar, Series, bar_chart, line_chart
from .table import Measured
from .throughput import FileFigures, Throughput

PARTS = ("draft", "verify", "other")


@dataclass(frozen=True)
class Chart:
    """title and text: HTML-free. drawing: HTML. legend: series by their names and colors."""

    title: str
    text: str
    drawing: str
    legend: Sequence[Series] = ()


def charts(analysis: Measured) -> list[Chart]:
    """Those that the figures suffice for."""
    if isinstance(analysis, Throughput):
        return [_throughput(analysis.methods)]
    drawn = (_speedup, _acceptance, _parts, _costs, _categories)
    return [chart for draw in drawn if (chart := draw(analysis)) is not None]


def _throughput(methods: Sequence[FileFigures]) -> Chart:
    series = []
    for family in dict.fromkeys(one.family for one in methods):
        points = [
            (one.batch_size, Estimate(one.tokens_per_second))
            for one in methods
            if one.family == family and one.tokens_per_second is not None
        ]
        series.append(Series(family, "none" if family == "plain" else family, points))
    text = "Generated tokens per second of the whole file, the prompts' time included."
    top = 1.06 * max(one.tokens_per_second or 0.0 for one in methods)
    chart = _lines("Throughput", text, ("texts at a time", "tokens per second"), series, top)
    assert chart is not None
    return chart


def _speedup(analysis: Analysis) -> Chart | None:
    series = []
    for family, methods in _fixed(analysis):
        points = [(int(m.num_draft), m.speed_up.overall) for m in methods if m.speed_up]
        series.append(Series(family, family, points))
    for family, speeds in analysis.predictions.items():
        points = list(enumerate(map(Estimate, speeds), start=1))
        series.append(Series(f"{family}, predicted", family, points, dashed=True))
    text = "Tokens per second over plain decoding's (the line at 1), with 95 % intervals."
    if analysis.predictions:
        text += " Dashed: S(γ), from acceptance, the lengths of the sequences and the costs below."
    learned = [one for one in analysis.methods if one.num_draft == "auto" and one.speed_up]
    if learned:
        ratios = ", ".join(f"{one.name}: {overall(one):.2f}" for one in learned)
        text += f" Chosen while decoding: {ratios}."
    axes = ("tokens drafted a round", "speedup")
    return _lines("Speedup by draft length", text, axes, series)


def _acceptance(analysis: Analysis) -> Chart | None:
    series = []
    for family, methods in _fixed(analysis):
        longest = max(methods, key=lambda one: len(one.acceptance))
        shares = map(Estimate, longest.acceptance)
        series.append(Series(longest.name, family, list(enumerate(shares, start=1))))
    text = "Share of rounds in which this drafted token and all before it were accepted."
    axes = ("position in the draft", "share")
    return _lines("Acceptance by position", text, axes, series, top=1.0)


def _parts(analysis: Analysis) -> Chart | None:
    bars = [
        Bar(one.name, [(part, part, getattr(one.parts, part) * 1e3) for part in PARTS])
        for one in analysis.methods
        if one.parts is not None
    ]
    text = (
        "Milliseconds of an average round, all rounds timed in parts: drafting, the target's pass, "
        f"and everything else. A plain step takes {analysis.plain_step * 1e3:.2f} ms."
    )
    return _bars("Where a round's time goes", text, bars, " ms", PARTS)


def _costs(analysis: Analysis) -> Chart | None:
    costs, step = analysis.costs, analysis.plain_step
    if costs is None:
        return None
    measured = [(m, Estimate(seconds / step)) for m, seconds in sorted(costs.passes.items())]
    rounds = [
        (one.num_draft + 1, Estimate(one.parts.verify / step))
        for one in analysis.methods
        if one.parts is not None and one.family == "draft" and one.num_draft != "auto"
    ]
    series = [
        Series("target pass, measured between sequences", "verify", measured),
        Series("within rounds", "other", sorted(rounds, key=itemgetter(0))),
    ]
    text = "V(m): a pass of the target over m tokens, in plain steps."
    if costs.draft is not None:
        text += f" A draft step costs c = {costs.draft / step:.2f}."
    return _lines("What a pass costs", text, ("tokens in the pass", "plain steps"), series)


def _categories(analysis: Analysis) -> Chart | None:
    shown = [best for _, methods in _fixed(analysis) if (best := fastest(methods)) is not None]
    shown += [one for one in analysis.methods if one.num_draft == "auto"]
    bars = [
        Bar(one.name, [("", one.family, ratio.value)], ratio.interval, category)
        for category in dict.fromkeys(name for one in shown for name in one.by_category)
        for one in shown
        if category in one.by_category and (ratio := one.by_category[category].overall)
    ]
    text = (
        "Tokens per second over plain decoding's, with 95 % intervals from 5 sequences on, of each "
        "proposer's and program's best length and of what was chosen while decoding."
    )
    return _bars("By category of prompts", text, bars)


def _bars(
    title: str, text: str, bars: Sequence[Bar], unit: str = "", parts: Sequence[str] = ()
) -> Chart | None:
    legend = [Series(name, name, ()) for name in parts]
    return Chart(title, text, bar_chart(bars, unit), legend) if bars else None


def _lines(
    title: str,
    text: str,
    axes: tuple[str, str],
    series: Sequence[Series],
    top: float | None = None,
) -> Chart | None:
    drawn = [one for one in series if one.points]
    return Chart(title, text, line_chart(drawn, axes, top), drawn) if drawn else None


def _fixed(analysis: Analysis) -> Iterator[tuple[str, list[Figures]]]:
    """Methods with a draft length, by family."""
    for family in dict.fromkeys(one.family for one in analysis.methods):
        methods = [one for one in analysis.methods if one.family == family]
        methods = [one for one in methods if one.num_draft not in (0, "auto")]
        if methods:
            yield family, methods
