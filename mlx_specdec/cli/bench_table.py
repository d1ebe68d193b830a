"""The figures of a benchmark as a table in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO

from . import render

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.analysis import Analysis
    from ..bench.setting import Setting

DISPENSABLE = (5, 4, 6, 3, 7, 8)
"""Columns that a narrow terminal does without, the first one first."""


def show(analysis: Analysis, setting: Setting, stream: TextIO) -> None:
    """Write the table. Raises as render.write does."""
    from ..bench.table import COLUMNS, verdict

    console = render.console_for(stream)
    shown, anywhere = list(range(len(COLUMNS))), console.options.update(width=1000)
    dispensable = iter(DISPENSABLE)
    table = _table(analysis, shown)
    while console.measure(table, options=anywhere).maximum > console.width and len(shown) > 3:
        shown.remove(next(dispensable))
        table = _table(analysis, shown)
    notes = (text for text in (_caption(analysis), verdict(analysis), *setting.notes) if text)
    render.write(stream, render.laid_out(stream, _title(setting), table, *notes))


def differences(analysis: Analysis) -> Iterator[str]:
    """One line for every method whose texts were not what they had to be."""
    for one in analysis.methods:
        if one.differences:
            margins = [each.margin for each in one.differences if each.margin is not None]
            least = f", least margin {min(margins):.2g}" if margins else ""
            yield (
                f"{one.name}: {len(one.differences)} of {one.compared} texts are not plain "
                f"decoding's own{least}"
            )


def _table(analysis: Analysis, columns: Sequence[int]) -> Table:
    """With no cell cut; headings of two words take two lines."""
    from ..bench.analysis import fastest
    from ..bench.table import COLUMNS, cells

    names = [COLUMNS[at].replace(" ", "\n") if at else COLUMNS[at] for at in columns]
    table = render.table(*(f">{name}" if at else name for at, name in enumerate(names)))
    for numbers in table.columns[1:]:
        numbers.no_wrap = True
    best = fastest(analysis.methods)
    for figures in analysis.methods:
        row = cells(figures)
        table.add_row(*(row[at] for at in columns), style="bold" if figures is best else None)
    return table


def _title(setting: Setting) -> str:
    draft = f" with {setting.draft_model}" if setting.draft_model else ""
    share = setting.simulated_acceptance
    simulated = "" if share is None else f"simulated acceptance probability {share:g}, no text; "
    return (
        f"{setting.model}{draft}, {setting.dtype}, temperature {setting.temperature:g}; {simulated}"
        f"{setting.device}, BLAS {setting.blas}"
    )


def _caption(analysis: Analysis) -> str:
    skipped = f"; {len(analysis.skipped)} skipped" if analysis.skipped else ""
    interrupted = "; interrupted" if analysis.interrupted else ""
    return (
        f"{analysis.texts} texts, each up to {analysis.repeats} times, methods in turns{skipped}"
        f"{interrupted}"
    )
