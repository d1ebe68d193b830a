"""The five charts of a report, as SVG with a legend; where there is nothing to show, none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .analysis import Analysis, Figures, fastest, overall
from .svg import Bar, Point, Series, bar_chart, line_chart

PARTS = ("draft", "verify", "other")


@dataclass(frozen=True)
class Chart:
    """title and text: HTML-free. svg: HTML. legend: series by their names and colors."""

    title: str
    text: str
    svg: str
    legend: Sequence[Series] = ()


def charts(analysis: Analysis) -> list[Chart]:
    """Those that the figures suffice for."""
    drawn = (_speedup, _acceptance, _parts, _costs, _categories)
    return [chart for draw in drawn for chart in draw(analysis)]


def _speedup(analysis: Analysis) -> Iterator[Chart]:
    series = []
    for family, methods in _fixed(analysis):
        rated = [(one.num_draft, one.speed_up.overall) for one in methods if one.speed_up]
        points = [Point(float(n), ratio.value, ratio.low, ratio.high) for n, ratio in rated]
        series.append(Series(family, family, points))
    for family, speeds in analysis.predictions.items():
        points = [Point(gamma, speed) for gamma, speed in enumerate(speeds, start=1)]
        series.append(Series(f"{family}, predicted", family, points, dashed=True))
    text = "Tokens per second over plain decoding's (the line at 1), with 95 % intervals."
    if analysis.predictions:
        text += " Dashed: S(γ), from acceptance, the lengths of the sequences and the costs below."
    learned = [one for one in analysis.methods if one.num_draft == "auto" and one.speed_up]
    if learned:
        ratios = ", ".join(f"{one.name}: {overall(one):.2f}" for one in learned)
        text += f" Chosen while decoding: {ratios}."
    axes = ("tokens drafted a round", "speedup")
    yield from _lines("Speedup by draft length", text, axes, series, base=1.0)


def _acceptance(analysis: Analysis) -> Iterator[Chart]:
    series = []
    for family, methods in _fixed(analysis):
        longest = max(methods, key=lambda one: len(one.acceptance))
        points = [Point(at, share) for at, share in enumerate(longest.acceptance, start=1)]
        series.append(Series(longest.name, family, points))
    text = "Share of rounds in which this drafted token and all before it were accepted."
    axes = ("position in the draft", "share")
    yield from _lines("Acceptance by position", text, axes, series, y_range=(0.0, 1.0))


def _parts(analysis: Analysis) -> Iterator[Chart]:
    bars = [
        Bar(one.name, [(part, part, getattr(one.parts, part) * 1e3) for part in PARTS])
        for one in analysis.methods
        if one.parts is not None
    ]
    if bars:
        yield Chart(
            "Where a round's time goes",
            "Milliseconds of an average round, all rounds timed in parts: drafting, the target's "
            f"pass, and everything else. A plain step takes {analysis.plain_step * 1e3:.2f} ms.",
            bar_chart(bars, x_label="milliseconds a round", unit=" ms"),
            [Series(name, name, ()) for name in PARTS],
        )


def _costs(analysis: Analysis) -> Iterator[Chart]:
    costs, step = analysis.costs, analysis.plain_step
    if costs is None:
        return
    measured = [Point(rows, seconds / step) for rows, seconds in sorted(costs.passes.items())]
    rounds = sorted(
        (one.num_draft + 1, one.parts.verify / step)
        for one in analysis.methods
        if one.parts is not None and one.family == "draft" and one.num_draft != "auto"
    )
    series = [
        Series("target pass, measured between sequences", "verify", measured),
        Series("within rounds", "other", [Point(rows, cost) for rows, cost in rounds]),
    ]
    text = "V(m): a pass of the target over m tokens, in plain steps."
    if costs.draft is not None:
        text += f" A draft step costs c = {costs.draft / step:.2f}."
    axes = ("tokens in the pass", "plain steps")
    yield from _lines("What a pass costs", text, axes, series, base=1.0)


def _categories(analysis: Analysis) -> Iterator[Chart]:
    shown = [best for _, methods in _fixed(analysis) if (best := fastest(methods)) is not None]
    shown += [one for one in analysis.methods if one.num_draft == "auto"]
    bars = [
        Bar(one.name, [("", one.family, ratio.value)], ratio.low, ratio.high, category)
        for category in dict.fromkeys(name for one in shown for name in one.by_category)
        for one in shown
        if category in one.by_category and (ratio := one.by_category[category].overall)
    ]
    if bars:
        yield Chart(
            "By category of prompts",
            "Tokens per second over plain decoding's, with 95 % intervals from 5 sequences on, of "
            "each proposer's and program's best length and of what was chosen while decoding.",
            bar_chart(bars, x_label="speedup", base=1.0),
        )


def _lines(
    title: str,
    text: str,
    axes: tuple[str, str],
    series: Sequence[Series],
    base: float | None = None,
    y_range: tuple[float, float] | None = None,
) -> Iterator[Chart]:
    drawn = [one for one in series if one.points]
    if drawn:
        across, up = axes
        drawing = line_chart(drawn, x_label=across, y_label=up, base=base, y_range=y_range)
        yield Chart(title, text, drawing, drawn)


def _fixed(analysis: Analysis) -> Iterator[tuple[str, list[Figures]]]:
    """Methods with a draft length, by family."""
    for family in dict.fromkeys(one.family for one in analysis.methods):
        methods = [one for one in analysis.methods if one.family == family]
        methods = [one for one in methods if one.num_draft not in (0, "auto")]
        if methods:
            yield family, methods
