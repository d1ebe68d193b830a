"""One HTML file that shows a benchmark, in light and dark, and needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ..errors import OutputError
from .analysis import Analysis, fastest, overall
from .charts import Chart, charts
from .drawing import Series, color
from .setting import Setting
from .table import COLUMNS, as_dict, cells, verdict

MOST_DIFFERENCES = 20


def write_report(analysis: Analysis, setting: Setting, file: Path) -> None:
    """Write the page. Nothing is left half-written; raises OutputError."""
    started = file.with_name(f".{file.name}.part")
    try:
        started.write_text(page(analysis, setting), encoding="utf-8")
        os.replace(started, file)
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Analysis, setting: Setting) -> str:
    """The whole page. Its own figures are in it once more, as JSON."""
    title = f"{_short(setting.model)}: what speculation gains"
    style = files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    # "</script>" in a model's name must not end the element.
    data = json.dumps(as_dict(analysis, setting), ensure_ascii=False, allow_nan=False)
    data = data.replace("<", "\\u003c")
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
            f"<title>{escape(title)}</title><style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{escape(_subtitle(setting))}</p>',
            *_warnings(analysis, setting),
            f"<p><strong>{escape(verdict(analysis))}</strong></p>",
            _tiles(analysis),
            '<div class="card"><h2>All methods</h2>',
            f'<p class="soft">{analysis.texts} sequences, each made up to {analysis.repeats} times '
            "by every method, methods in turns; one counts with the median of its repeats, without "
            "its prompt pass. Intervals by bootstrap over sequences, from five on.</p>",
            f'<div class="scroll">{_table(analysis)}</div></div>',
            f'<div class="charts">{"".join(map(_chart, charts(analysis)))}</div>',
            *_differences(analysis),
            f'<div class="card"><h2>Measured with</h2>{_facts(setting)}</div>',
            f'<script type="application/json" id="figures">{data}</script>',
            "</body></html>\n",
        ]
    )


def _subtitle(setting: Setting) -> str:
    draft = f"draft {_short(setting.draft_model)}, " if setting.draft_model else ""
    return (
        f"{draft}{setting.dtype}, temperature {setting.temperature:g}, rule {setting.rule}; "
        f"{setting.machine}, {setting.date}"
    )


def _warnings(analysis: Analysis, setting: Setting) -> Iterator[str]:
    told = []
    if analysis.interrupted:
        told.append("Interrupted: these are the sequences measured until then.")
    if setting.simulated_acceptance is not None:
        told.append(
            f"Simulated: drafted tokens stayed with probability "
            f"{setting.simulated_acceptance:g}. What was made is no text."
        )
    elif setting.lossy:
        told.append("Lossy settings: sequences may differ from the target's own.")
    if analysis.skipped:
        first = next(iter(analysis.skipped.values()))
        told.append(f"{len(analysis.skipped)} prompts were skipped; the first: {first}")
    return (f'<p class="warning">{escape(text, quote=False)}</p>' for text in told)


def _tiles(analysis: Analysis) -> str:
    plain, *others = analysis.methods
    best = fastest(one for one in others if one.acceptance_rate is not None)
    tiles = []
    if best is not None:
        tiles.append((f"{overall(best):.2f} ×", f"plain decoding, at best ({best.name})"))
        tiles.append((f"{best.acceptance_rate:.0%}", f"of drafted tokens accepted ({best.name})"))
    if plain.tokens_per_second is not None:
        tiles.append((f"{plain.tokens_per_second:.1f}", "tokens/s, plain and pipelined"))
    compared = sum(one.compared for one in others)
    if compared:
        same = compared - sum(len(one.differences) for one in others)
        tiles.append(
            (f"{same} of {compared}", "sequences are plain decoding's own, token for token")
        )
    cells = (
        f'<div class="tile"><b>{escape(big)}</b><span>{escape(what)}</span></div>'
        for big, what in tiles
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _table(analysis: Analysis) -> str:
    best = fastest(analysis.methods)
    head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    rows = []
    for one in analysis.methods:
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells(one))
        rows.append(f"<tr{' class=best' if one is best else ''}>{row}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _differences(analysis: Analysis) -> Iterator[str]:
    lines = [
        f"{one.name}, prompt {each.prompt + 1}, token {each.position}"
        + (f", least margin {each.margin:.3g}" if each.margin is not None else "")
        for one in analysis.methods
        for each in one.differences
    ]
    if lines:
        more = len(lines) - MOST_DIFFERENCES
        shown = lines[:MOST_DIFFERENCES] + ([f"and {more} more"] if more > 0 else [])
        items = "".join(f"<li>{escape(line)}</li>" for line in shown)
        yield f'<div class="card"><h2>Sequences that are not the same</h2><ul>{items}</ul></div>'


def _facts(setting: Setting) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in setting.versions.items())
    facts = {
        "target": setting.model,
        "draft": setting.draft_model or "none",
        "prompts": f"{setting.prompts}, at most {setting.max_tokens} tokens each",
        "seed": str(setting.seed),
        "device": f"{setting.device}, BLAS {setting.blas}",
        "machine": f"{setting.machine}, {setting.system}",
        "versions": f"Python {setting.python}, {versions}",
        "other programs": "; ".join(setting.notes) or "not measured",
        "date": setting.date,
    }
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _chart(chart: Chart) -> str:
    return (
        f'<section class="chart"><h2>{escape(chart.title)}</h2><p>{escape(chart.text)}</p>'
        f"{_legend(chart.legend)}{chart.drawing}</section>"
    )


def _legend(series: Sequence[Series]) -> str:
    entries = (
        f'<span class="key{" dashed" if one.dashed else ""}" '
        f'style="{color(one.color)}">{escape(one.name)}</span>'
        for one in series
    )
    return f'<p class="legend">{"".join(entries)}</p>' if series else ""


def _short(name: str) -> str:
    return Path(name).name or name
