"""The figures of a benchmark as a table in a terminal.

Knows rich and two streams. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from . import render

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.analysis import Analysis, Figures
    from ..bench.bootstrap import Estimate
    from ..bench.setting import Setting

COLUMNS = (
    "method",
    ">tokens/s",
    ">speedup",
    ">95 %",
    ">median",
    ">predicted",
    ">tokens\nper pass",
    ">acceptance\nrate",
    ">same\ntext",
)
DISPENSABLE = (5, 4, 6, 3, 7, 8)
"""Columns that a narrow terminal does without, the first one first."""
FEWEST_TEXTS = 5
"""An interval from fewer texts would promise what nobody knows."""


def show(analysis: Analysis, setting: Setting, stream: TextIO) -> None:
    """Write the table. Raises as render.write does."""
    console = render.console_for(stream)
    shown, anywhere = list(range(len(COLUMNS))), console.options.update(width=1000)
    for column in (None, *DISPENSABLE):
        if column is not None:
            shown.remove(column)
        table = _table(analysis, shown)
        if console.measure(table, options=anywhere).maximum <= console.width:
            break
    with console.capture() as captured:
        console.print(_title(setting), table, _caption(analysis, setting), sep="\n")
    render.write(stream, captured.get())


def _table(analysis: Analysis, columns: Sequence[int]) -> Table:
    """With no cell cut."""
    table = render.table(*(COLUMNS[column] for column in columns))
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    best = _best(analysis.methods)
    for figures in analysis.methods:
        row = _row(figures)
        table.add_row(*(row[at] for at in columns), style="bold" if figures is best else None)
    return table


def describe_differences(analysis: Analysis) -> str:
    """One line for every method whose texts were not what they had to be."""
    lines = []
    for figures in analysis.methods:
        if figures.differences:
            margins = [one.margin for one in figures.differences if one.margin is not None]
            least = f", least margin {min(margins):.2g}" if margins else ""
            lines.append(
                f"{figures.name}: {len(figures.differences)} of {figures.compared} texts are not "
                f"plain decoding's own{least}"
            )
    return "\n".join(lines)


def _title(setting: Setting) -> str:
    draft = f" with {setting.draft_model}" if setting.draft_model else ""
    share = setting.simulated_acceptance
    simulated = "" if share is None else f"simulated acceptance probability {share:g}, no text; "
    return (
        f"{setting.model}{draft}, {setting.dtype}, temperature {setting.temperature:g}; {simulated}"
        f"{setting.device}, BLAS {setting.blas}"
    )


def _caption(analysis: Analysis, setting: Setting) -> str:
    texts = f"{analysis.texts} texts, each up to {analysis.repeats} times, methods in turns"
    skipped = f"; {len(analysis.skipped)} skipped" if analysis.skipped else ""
    told = texts + skipped + ("; interrupted" if analysis.interrupted else "")
    return "\n".join([told, *setting.notes])


def _row(figures: Figures) -> Sequence[str]:
    ratio = figures.speed_up
    alone = figures.family == "plain"
    few = figures.texts < FEWEST_TEXTS
    return (
        figures.name,
        _number(figures.tokens_per_second, ".1f"),
        _number(ratio.overall.value if ratio else None, ".2f"),
        "" if alone or few or ratio is None else _interval(ratio.overall),
        "" if alone or ratio is None else f"{ratio.per_text.value:.2f}",
        _number(figures.predicted, ".2f"),
        _number(figures.tokens_per_round, ".2f"),
        _number(figures.acceptance_rate, ".0%"),
        _same(figures),
    )


def _same(figures: Figures) -> str:
    if figures.family == "plain":
        return ""
    if not figures.same_text:
        return "not promised"
    return f"{figures.compared - len(figures.differences)} of {figures.compared}"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{estimate.low:.2f}-{estimate.high:.2f}"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _best(methods: Sequence[Figures]) -> Figures | None:
    rated = [one for one in methods if one.speed_up is not None]
    return max(
        rated, key=lambda one: one.speed_up.overall.value if one.speed_up else 0.0, default=None
    )
