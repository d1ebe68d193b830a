"""One HTML file that shows a benchmark, in light and dark, and needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from ..errors import OutputError
from .analysis import Analysis, fastest, overall
from .drawing import Chart, charts, color
from .setting import Setting
from .table import Measured, Table, as_dict, cluster_table, cluster_text, most, table, verdict
from .throughput import Throughput

MOST_DIFFERENCES = 20
ONE_COUNTS = (
    "one counts with the median of its repeats, without its prompt pass. Intervals by bootstrap "
    "over sequences, from five on"
)
ALL_COUNT = "the time of all together counts, prompt passes included, as the median of the repeats"


def write_report(analysis: Measured, setting: Setting, file: Path) -> None:
    """Write the page. Nothing is left half-written; raises OutputError."""
    started = file.with_name(f".{file.name}.part")
    try:
        started.write_text(page(analysis, setting), encoding="utf-8")
        os.replace(started, file)
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Measured, setting: Setting) -> str:
    """The whole page. Its own figures are in it once more, as JSON."""
    what, counts = "what speculation gains", ONE_COUNTS
    if isinstance(analysis, Throughput):
        what, counts = "throughput by batch size", ALL_COUNT
    template, style = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css")
    )
    data = json.dumps(as_dict(analysis, setting), ensure_ascii=False, allow_nan=False)
    return Template(template).substitute(
        style=style,
        title=escape(f"{_short(setting.model)}: {what}"),
        subtitle=escape(_subtitle(setting)),
        warnings="".join(_warnings(analysis, setting)),
        verdict=escape(verdict(analysis)),
        tiles="".join(_tiles(analysis)),
        texts=analysis.texts,
        repeats=analysis.repeats,
        counts=counts,
        table=_table(table(analysis)),
        cluster="".join(_cluster(analysis)),
        charts="".join(map(_chart, charts(analysis))),
        differences="".join(_differences(analysis)),
        facts=_facts(setting),
        # "</script>" in a model's name must not end the element.
        data=data.replace("<", "\\u003c"),
    )


def _subtitle(setting: Setting) -> str:
    draft = f"draft {_short(setting.draft_model)}, " if setting.draft_model else ""
    return (
        f"{draft}{setting.dtype}, temperature {setting.temperature:g}, rule {setting.rule}; "
        f"{setting.machine}, {setting.date}"
    )


def _warnings(analysis: Measured, setting: Setting) -> Iterator[str]:
    share = setting.simulated_acceptance
    if analysis.interrupted:
        yield _warning("Interrupted: these are the sequences measured until then.")
    if share is not None:
        yield _warning(
            f"Simulated: drafted tokens stayed with probability {share:g}. What was made is no "
            "text."
        )
    elif setting.lossy:
        yield _warning("Lossy settings: sequences may differ from the target's own.")
    if analysis.skipped:
        first = next(iter(analysis.skipped.values()))
        yield _warning(f"{len(analysis.skipped)} prompts were skipped; the first: {first}")


def _warning(text: str) -> str:
    return f'<p class="warning">{escape(text, quote=False)}</p>'


def _tiles(analysis: Measured) -> Iterator[str]:
    plain, *others = analysis.methods
    if isinstance(analysis, Throughput):
        most_of_all = most(analysis.methods)
        name = f"plain decoding of one text at a time, at best ({most_of_all.name})"
        yield _tile(f"{most_of_all.speed_up:.2f} ×", name)
    else:
        yield from _speculation_tiles(analysis)
    if plain.tokens_per_second is not None:
        yield _tile(f"{plain.tokens_per_second:.1f}", "tokens/s, plain and pipelined")
    compared = sum(one.compared for one in others)
    if compared:
        same = compared - sum(len(one.differences) for one in others)
        yield _tile(f"{same} of {compared}", "sequences are plain decoding's own, token for token")


def _speculation_tiles(analysis: Analysis) -> Iterator[str]:
    _, *others = analysis.methods
    best = fastest(one for one in others if one.acceptance_rate is not None)
    if best is not None:
        yield _tile(f"{overall(best):.2f} ×", f"plain decoding, at best ({best.name})")
        yield _tile(f"{best.acceptance_rate:.0%}", f"of drafted tokens accepted ({best.name})")


def _tile(big: str, what: str) -> str:
    return f'<div class="tile"><b>{escape(big)}</b><span>{escape(what)}</span></div>'


def _table(shown: Table) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in shown.columns)
    rows = []
    for number, cells in enumerate(shown.rows):
        row = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        rows.append(f"<tr{' class=best' if number == shown.best else ''}>{row}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _cluster(analysis: Measured) -> Iterator[str]:
    if isinstance(analysis, Analysis) and analysis.cluster is not None:
        text = escape(cluster_text(analysis.cluster, analysis.plain_step))
        gains = _table(cluster_table(analysis.cluster))
        yield (
            f'<div class="card"><h2>On several machines</h2><p class="soft">{text}</p>'
            f'<div class="scroll">{gains}</div></div>'
        )


def _differences(analysis: Measured) -> Iterator[str]:
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
        "notes": "; ".join(setting.notes) or "no other programs",
        "date": setting.date,
    }
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _chart(chart: Chart) -> str:
    keys = "".join(
        f'<span class="key{" dashed" if one.dashed else ""}" '
        f'style="{color(one.color)}">{escape(one.name)}</span>'
        for one in chart.legend
    )
    return (
        f'<section class="chart"><h2>{escape(chart.title)}</h2><p>{escape(chart.text)}</p>'
        f'<p class="legend">{keys}</p>{chart.drawing}</section>'
    )


def _short(name: str) -> str:
    return Path(name).name or name
