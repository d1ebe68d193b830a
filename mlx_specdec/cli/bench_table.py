"""The figures of a benchmark as a table in a terminal.

Knows rich and two streams. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from . import render

if TYPE_CHECKING:
    from ..bench.analysis import Analysis, Figures
    from ..bench.bootstrap import Estimate
    from ..bench.setting import Setting

COLUMNS = (
    "method",
    "tokens/s",
    "x plain",
    "95 %",
    "median",
    "predicted",
    "per round",
    "accepted",
    "same text",
)
NOT_A_TERMINAL = 120
"""Columns of a table that goes into a file."""


def show(analysis: Analysis, setting: Setting, stream: TextIO) -> None:
    """Write the table. Raises as render.write does."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(setting), title_justify="left", caption_justify="left")
    table.caption = _caption(analysis, setting)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    best = _best(analysis.methods)
    for figures in analysis.methods:
        table.add_row(
            *(Text(cell) for cell in _row(figures)), style="bold" if figures is best else None
        )
    console = Console(
        file=stream,
        width=None if stream.isatty() else NOT_A_TERMINAL,
        no_color=not render.wants_colour(stream),
        force_terminal=stream.isatty(),
    )
    with console.capture() as captured:
        console.print(table)
    render.write(stream, captured.get())


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
    simulated = "" if share is None else f"simulated acceptance {share:g}, no text; "
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
    return (
        figures.name,
        _number(figures.tokens_per_second, ".1f"),
        _number(ratio.overall.value if ratio else None, ".2f"),
        "" if alone or ratio is None else _interval(ratio.overall),
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
