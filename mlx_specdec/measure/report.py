"""One HTML file that shows a benchmark, in light and dark, and needs no network."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from string import Template

from ..errors import OutputError
from .analysis import Analysis, Figures, Value, fastest, overall
from .drawing import Bar, Series, bar_chart, color, line_chart
from .table import (
    Measured,
    Setting,
    Table,
    as_dict,
    cluster_table,
    cluster_text,
    most,
    table,
    verdict,
)
from .throughput import FileFigures, Throughput

PARTS = ("draft", "verify", "other")
MOST_DIFFERENCES = 20
ONE_COUNTS = (
    "one counts with the median of its repeats, without its prompt pass. Intervals by bootstrap "
    "over sequences, from five on"
)
ALL_COUNT = "the time of all together counts, prompt passes included, as the median of the repeats"


def write_report(analysis: Measured, setting: Setting, file: Path) -> None:
    """Write the page, whole or not at all. Raises OutputError."""
    started = file.with_name(f".{file.name}.part")
    try:
        started.write_text(page(analysis, setting), encoding="utf-8")
        os.replace(started, file)
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Measured, setting: Setting) -> str:
    """Return the whole page. It holds its figures once more, as JSON."""
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
        warnings="".join(
            f'<p class="warning">{escape(text, quote=False)}</p>'
            for text in _warnings(analysis, setting)
        ),
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
        yield "Interrupted: these are the sequences measured until then."
    if share is not None:
        yield (
            f"Simulated: drafted tokens stayed with probability {share:g}. What was made is no "
            "text."
        )
    elif setting.lossy:
        yield "Lossy settings: sequences may differ from the target's own."
    if analysis.skipped:
        first = next(iter(analysis.skipped.values()))
        yield f"{len(analysis.skipped)} prompts were skipped; the first: {first}"


def _tiles(analysis: Measured) -> Iterator[str]:
    plain, *others = analysis.methods
    if isinstance(analysis, Throughput):
        first = most(analysis.methods)
        name = f"plain decoding of one text at a time, at best ({first.name})"
        yield _tile(f"{first.speed_up:.2f} ×", name)
    else:
        best = fastest(one for one in analysis.methods[1:] if one.acceptance_rate is not None)
        if best is not None:
            yield _tile(f"{overall(best):.2f} ×", f"plain decoding, at best ({best.name})")
            yield _tile(f"{best.acceptance_rate:.0%}", f"of drafted tokens accepted ({best.name})")
    if plain.tokens_per_second is not None:
        yield _tile(f"{plain.tokens_per_second:.1f}", "tokens/s, plain and pipelined")
    compared = sum(one.compared for one in others)
    if compared:
        same = compared - sum(len(one.differences) for one in others)
        yield _tile(f"{same} of {compared}", "sequences are plain decoding's own, token for token")


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


@dataclass(frozen=True)
class Chart:
    """A drawing in HTML, with its title and text, which are not. legend: names and colors."""

    title: str
    text: str
    drawing: str
    legend: Sequence[Series] = ()


def charts(analysis: Measured) -> list[Chart]:
    """Return the charts that the figures suffice for."""
    if isinstance(analysis, Throughput):
        drawn = [_throughput(analysis.methods)]
    else:
        drawn = [draw(analysis) for draw in (_speedup, _acceptance, _parts, _costs, _categories)]
    return [chart for chart in drawn if chart is not None]


def _throughput(methods: Sequence[FileFigures]) -> Chart | None:
    series = []
    for family in dict.fromkeys(one.family for one in methods):
        points = [
            (one.batch_size, Value(one.tokens_per_second))
            for one in methods
            if one.family == family and one.tokens_per_second is not None
        ]
        series.append(Series(family, "none" if family == "plain" else family, points))
    text = "Generated tokens per second of the whole file, the prompts' time included."
    top = 1.06 * max(one.tokens_per_second or 0.0 for one in methods)
    return _lines("Throughput", text, ("texts at a time", "tokens per second"), series, top)


def _speedup(analysis: Analysis) -> Chart | None:
    series = []
    for family, methods in _fixed(analysis):
        points = [(int(m.num_draft), m.speed_up.overall) for m in methods if m.speed_up]
        series.append(Series(family, family, points))
    for family, speeds in analysis.predictions.items():
        points = list(enumerate(map(Value, speeds), start=1))
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
        shares = map(Value, longest.acceptance)
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
    legend = [Series(part, part, ()) for part in PARTS]
    return _bars("Where a round's time goes", text, bars, " ms", legend)


def _costs(analysis: Analysis) -> Chart | None:
    costs, step = analysis.costs, analysis.plain_step
    if costs is None:
        return None
    measured = [(m, Value(seconds / step)) for m, seconds in sorted(costs.passes.items())]
    rounds = [
        (one.num_draft + 1, Value(one.parts.verify / step))
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
    title: str, text: str, bars: Sequence[Bar], unit: str = "", legend: Sequence[Series] = ()
) -> Chart | None:
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
