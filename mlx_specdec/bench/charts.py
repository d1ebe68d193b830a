"""The five charts of a report, as SVG with a legend.

Knows which figures each shows. Where there is nothing to show there is no chart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .analysis import Analysis, Figures
from .svg import Bar, Group, Point, Series, bar_chart, line_chart

FAMILIES = ("draft", "ngram", "mlx-lm", "transformers")
"""Those with a colour of their own; others share one."""
PARTS = ("draft", "verify", "other")


@dataclass(frozen=True)
class Chart:
    """title and text: HTML-free. svg and legend: HTML."""

    title: str
    text: str
    svg: str
    legend: str


def charts(analysis: Analysis) -> list[Chart]:
    """Those that the figures suffice for."""
    drawn = (
        _speed_up(analysis),
        _acceptance(analysis),
        _parts(analysis),
        _costs(analysis),
        _categories(analysis),
    )
    return [chart for chart in drawn if chart is not None]


def _speed_up(analysis: Analysis) -> Chart | None:
    series: list[Series] = []
    for family, methods in _fixed(analysis):
        points = [
            Point(_length(one), ratio.value, ratio.low, ratio.high)
            for one in methods
            if (ratio := one.speed_up.overall if one.speed_up else None) is not None
        ]
        if points:
            series.append(Series(family, _colour(family), points))
    for family, speeds in analysis.predictions.items():
        points = [Point(gamma, speed) for gamma, speed in enumerate(speeds, start=1)]
        series.append(Series(f"{family}, predicted", _colour(family), points, dashed=True))
    if not series:
        return None
    autos = [
        f"{one.name}: {one.speed_up.overall.value:.2f}"
        for one in analysis.methods
        if one.num_draft == "auto" and one.speed_up is not None
    ]
    text = "Tokens per second over plain decoding's (the line at 1), with 95 % intervals."
    if analysis.predictions:
        text += " Dashed: S(γ), from acceptance, the lengths of the texts and the costs below."
    if autos:
        text += f" Chosen while decoding: {', '.join(autos)}."
    drawing = line_chart(series, x_label="tokens drafted a round", y_label="× plain", base=1.0)
    return Chart("Speed-up by draft length", text, drawing, _legend(series))


def _acceptance(analysis: Analysis) -> Chart | None:
    series = []
    for family, methods in _fixed(analysis):
        longest = max(methods, key=lambda one: len(one.acceptance))
        if longest.acceptance:
            points = [Point(at, share) for at, share in enumerate(longest.acceptance, start=1)]
            series.append(Series(longest.name, _colour(family), points))
    if not series:
        return None
    return Chart(
        "Acceptance by position",
        "Share of rounds in which this drafted token and all before it stayed.",
        line_chart(series, x_label="position in the draft", y_label="share", y_range=(0.0, 1.0)),
        _legend(series),
    )


def _parts(analysis: Analysis) -> Chart | None:
    bars = [
        Bar(
            one.name,
            [(part, part, getattr(one.parts, part) * 1e3) for part in PARTS],
        )
        for one in analysis.methods
        if one.parts is not None
    ]
    if not bars:
        return None
    colours = [Series(name, name, ()) for name in PARTS]
    return Chart(
        "Where a round's time goes",
        "Milliseconds of an average round, all rounds timed in parts: drafting, the target's pass, "
        f"and everything else. A plain step takes {analysis.plain_step * 1e3:.2f} ms.",
        bar_chart([Group("", bars)], x_label="milliseconds a round", unit=" ms"),
        _legend(colours),
    )


def _costs(analysis: Analysis) -> Chart | None:
    costs, step = analysis.costs, analysis.plain_step
    if costs is None:
        return None
    measured = [Point(rows, seconds / step) for rows, seconds in sorted(costs.passes.items())]
    series = [Series("target pass, measured between texts", "verify", measured)]
    rounds = sorted(
        (_length(one) + 1, one.parts.verify / step)
        for one in analysis.methods
        if one.parts is not None and one.family == "draft"
    )
    if rounds:
        points = [Point(rows, cost) for rows, cost in rounds]
        series.append(Series("within rounds", "other", points))
    text = "V(m): a pass of the target over m tokens, in plain steps."
    if costs.draft is not None:
        text += f" A draft step costs c = {costs.draft / step:.2f}."
    drawing = line_chart(series, x_label="tokens in the pass", y_label="plain steps", base=1.0)
    return Chart("What a pass costs", text, drawing, _legend(series))


def _categories(analysis: Analysis) -> Chart | None:
    shown = _shown_by_category(analysis)
    names = list(dict.fromkeys(name for one in shown for name in one.by_category))
    if not names:
        return None
    groups = [
        Group(
            name,
            [
                Bar(one.name, [("", _colour(one.family), ratio.value)], ratio.low, ratio.high)
                for one in shown
                if name in one.by_category and (ratio := one.by_category[name].overall)
            ],
        )
        for name in names
    ]
    return Chart(
        "By category of prompts",
        "Tokens per second over plain decoding's, with 95 % intervals: of each program and "
        "proposer its best length, and what was chosen while decoding.",
        bar_chart(groups, x_label="× plain", base=1.0),
        "",
    )


def _shown_by_category(analysis: Analysis) -> list[Figures]:
    shown = []
    for _, methods in _fixed(analysis):
        rated = [one for one in methods if one.speed_up is not None]
        if rated:
            shown.append(max(rated, key=_overall))
    return shown + [one for one in analysis.methods if one.num_draft == "auto"]


def _overall(figures: Figures) -> float:
    return figures.speed_up.overall.value if figures.speed_up is not None else 0.0


def _fixed(analysis: Analysis) -> Iterator[tuple[str, list[Figures]]]:
    """Methods with a draft length, by family."""
    families = dict.fromkeys(one.family for one in analysis.methods)
    for family in families:
        methods = [one for one in analysis.methods if one.family == family and _length(one) > 0]
        if methods:
            yield family, methods


def _length(figures: Figures) -> int:
    return figures.num_draft if isinstance(figures.num_draft, int) else 0


def _colour(family: str) -> str:
    return family if family in FAMILIES else "another"


def _legend(series: Sequence[Series] | Iterable[Series]) -> str:
    entries = [
        f'<span class="key{" dashed" if one.dashed else ""}" '
        f'style="--c:var(--c-{escape(one.colour)})">{escape(one.name)}</span>'
        for one in series
    ]
    return f'<p class="legend">{"".join(entries)}</p>' if entries else ""
