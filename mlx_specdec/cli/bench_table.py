"""The figures of a benchmark as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from . import render

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.setting import Setting
    from ..bench.table import Measured
    from ..bench.table import Table as Told

DISPENSABLE = (
    "predicted",
    "median sequence",
    "texts/s",
    "acceptance length",
    "95 % interval",
    "acceptance rate",
    "peak memory",
    "same text",
)
"""Columns that a narrow terminal does without, the first one first."""


def show(analysis: Measured, setting: Setting, stream: TextIO) -> None:
    """Write the table. Raises as render.write does."""
    from ..bench.analysis import Analysis
    from ..bench.table import cluster_table, cluster_text, table, verdict

    console, told = render.console_for(stream), table(analysis)
    shown, anywhere = list(told.columns), console.options.update(width=1000)
    dispensable = [name for name in DISPENSABLE if name in shown]
    laid = _table(told, shown)
    while console.measure(laid, options=anywhere).maximum > console.width and dispensable:
        shown.remove(dispensable.pop(0))
        laid = _table(told, shown)
    notes = (text for text in (_caption(analysis), verdict(analysis), *setting.notes) if text)
    shared: list[object] = []
    if isinstance(analysis, Analysis) and analysis.cluster is not None:
        gains = cluster_table(analysis.cluster)
        text = cluster_text(analysis.cluster, analysis.plain_step)
        shared = [text, _table(gains, gains.columns)]
    render.write(stream, render.laid_out(stream, _title(setting), laid, *notes, *shared))


def differences(analysis: Measured) -> Iterator[str]:
    """One line for every method whose texts were not what they had to be."""
    for one in analysis.methods:
        if one.differences:
            margins = [each.margin for each in one.differences if each.margin is not None]
            least = f", least margin {min(margins):.2g}" if margins else ""
            yield (
                f"{one.name}: {len(one.differences)} of {one.compared} texts are not plain "
                f"decoding's own{least}"
            )


def _table(told: Told, columns: Sequence[str]) -> Table:
    """With no cell cut; headings of two words take two lines."""
    places = [told.columns.index(name) for name in columns]
    names = [name.replace(" ", "\n") for name in columns]
    table = render.table(*(f">{name}" if at else name for at, name in enumerate(names)))
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    for number, row in enumerate(told.rows):
        style = "bold" if number == told.best else None
        table.add_row(*(row[at] for at in places), style=style)
    return table


def _title(setting: Setting) -> str:
    draft = f" with {setting.draft_model}" if setting.draft_model else ""
    share = setting.simulated_acceptance
    simulated = "" if share is None else f"simulated acceptance probability {share:g}, no text; "
    return (
        f"{setting.model}{draft}, {setting.dtype}, temperature {setting.temperature:g}; {simulated}"
        f"{setting.device}, BLAS {setting.blas}"
    )


def _caption(analysis: Measured) -> str:
    skipped = f"; {len(analysis.skipped)} skipped" if analysis.skipped else ""
    interrupted = "; interrupted" if analysis.interrupted else ""
    return (
        f"{analysis.texts} texts, each up to {analysis.repeats} times, methods in turns{skipped}"
        f"{interrupted}"
    )
