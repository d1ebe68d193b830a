"""One HTML file that shows a benchmark, in light and dark, and needs no network.

The markup is in report.html, a template of jinja2 that escapes every text."""

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from operator import itemgetter
from pathlib import Path
from textwrap import shorten, wrap

from ..errors import OutputError
from .analysis import Analysis, Figures, Value, fastest, overall
from .passes import PassCosts
from .table import Measured, Setting, as_dict, cluster_table, cluster_text, table, verdict
from .throughput import FileFigures, Throughput

PARTS = ("draft", "verify", "other")
MOST_DIFFERENCES = 20
LEFT, RIGHT, TOP, BOTTOM = 46, 546, 12, 258
"""Pixels of the corners of a line chart."""
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be distinguished."""
NUMBERS_APART = 20
"""Pixels between two numbers of an axis, at least."""
ONE_COUNTS = (
    "one counts with the median of its repeats, without its prompt pass. Intervals by bootstrap "
    "over sequences, from five on"
)
ALL_COUNT = "the time of all together counts, prompt passes included, as the median of the repeats"


def write_report(analysis: Measured, setting: Setting, file: Path) -> None:
    """Write the page. Raises OutputError."""
    try:
        file.write_text(page(analysis, setting), encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Measured, setting: Setting) -> str:
    """Return the whole page. It holds its figures once more, as JSON."""
    from jinja2 import Environment

    what, counts, shared = "what speculation gains", ONE_COUNTS, None
    if isinstance(analysis, Throughput):
        what, counts = "throughput by batch size", ALL_COUNT
    elif analysis.cluster is not None:
        text = cluster_text(analysis.cluster, analysis.plain_step)
        shared = {"text": text, "table": cluster_table(analysis.cluster)}
    template, style, drawing = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css", "picture.svg")
    )
    html = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    sentence = headline(analysis, setting)
    bars, lines = _picture_bars(analysis), wrap(sentence, 44)
    top = 100 + 50 * len(lines)
    picture = html.from_string(drawing).render(
        sentence=sentence,
        lines=lines,
        bars=bars,
        top=top,
        height=top + 58 * len(bars) + 100,
        small=[shorten(line, 100, placeholder=" ..") for line in _small_print(analysis, setting)],
    )
    data = json.dumps(as_dict(analysis, setting), ensure_ascii=False, allow_nan=False)
    differences = [
        f"{one.name}, prompt {found.prompt + 1}, token {found.position}"
        + ("" if found.margin is None else f", margin {found.margin:.3g}")
        + (", a tie" if found.tie else "")
        for one in analysis.methods
        for found in one.differences
    ]
    return html.from_string(template).render(
        style=style,
        sentence=sentence,
        picture=b64encode(picture.encode()).decode() if bars else "",
        title=f"{_short(setting.model)}: {what}",
        draft=f"draft {_short(setting.draft_model)}, " if setting.draft_model else "",
        setting=setting,
        warnings=_warnings(analysis, setting),
        verdict=verdict(analysis),
        analysis=analysis,
        counts=counts,
        table=table(analysis),
        cluster=shared,
        charts=charts(analysis),
        differences=differences[:MOST_DIFFERENCES],
        more=len(differences) - MOST_DIFFERENCES,
        versions=", ".join(f"{name} {number}" for name, number in setting.versions.items()),
        # "</script>" in a model's name must not end the element.
        data=data.replace("<", "\\u003c"),
    )


def headline(analysis: Measured, setting: Setting) -> str:
    """Return the sentence to share: what was gained, on which machine, and if texts were equal."""
    machine = setting.machine if setting.device == "cpu" else setting.device
    first = verdict(analysis).partition(";")[0].rstrip(".") or "Plain decoding was measured"
    if isinstance(analysis, Throughput):
        return f"On {machine}: {first}."
    own = [one for one in analysis.methods if one.acceptance_rate is not None]
    best, compared = fastest(own), sum(one.compared for one in own)
    if best is None or overall(best) <= 1:
        return f"On {machine}: {first}."
    gain = f"rafts made {_short(setting.model)} {overall(best):.2f} times as fast on {machine}"
    if setting.simulated_acceptance is not None:
        return f"Simulated d{gain}."
    if setting.lossy or not compared:
        return f"D{gain}."
    same = compared - sum(len(one.differences) for one in own)
    return f"D{gain}; {same} of {compared} texts are plain decoding's own."


def _picture_bars(analysis: Measured) -> list[tuple[str, float, str, bool]]:
    """Return label, share of the longest, value, and whether it is the best. Of single texts it is
    plain decoding, the best fixed length of each family, and what was chosen while decoding."""
    chosen: dict[object, tuple[float, str]] = {}
    for one in analysis.methods:
        if isinstance(one, FileFigures):
            chosen[one.name] = one.tokens_per_second or 0.0, one.name
        else:
            value = 1.0 if one.family == "plain" else overall(one)
            key = one.family, one.num_draft == "auto"
            chosen[key] = max(chosen.get(key, (0.0, "")), (value, one.name))
    shown = [(value, name) for value, name in chosen.values() if value > 0]
    if not shown:
        return []
    top = max(shown)
    unit = "{:.0f} tokens/s" if isinstance(analysis, Throughput) else "{:.2f} ×"
    return [
        (
            shorten(name, 24, placeholder=".."),
            value / top[0],
            unit.format(value),
            (value, name) == top,
        )
        for value, name in shown
    ]


def _small_print(analysis: Measured, setting: Setting) -> tuple[str, str]:
    drafts = ", ".join(map(_short, (setting.draft_model or "no draft").split(", ")))
    return (
        f"{_short(setting.model)}, {drafts}, {setting.dtype}, temperature {setting.temperature:g}, "
        f"{analysis.texts} texts",
        f"Tokens per second{'' if isinstance(analysis, Throughput) else ' over plain decoding'}; "
        f"mlx-specdec {setting.versions.get('mlx-specdec', '')}, {setting.date[:10]}",
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


def _short(name: str) -> str:
    return Path(name).name or name


@dataclass(frozen=True)
class Series:
    """Points (x, y) joined by a line. color: a name. dashed: with smaller marks."""

    name: str
    color: str
    points: Sequence[tuple[int, Value]]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """A chart of lines over whole numbers. axes: names of x and y. top: the highest value; without
    it the points decide, and there is a stronger line at 1. All places are pixels."""

    title: str
    text: str
    axes: tuple[str, str]
    series: Sequence[Series]
    top: float | None = None

    @property
    def drawn(self) -> list[Series]:
        """The series that have points."""
        return [one for one in self.series if one.points]

    @property
    def high(self) -> float:
        """The highest value."""
        values = [y.high or y.value for one in self.drawn for _, y in one.points]
        return self.top or 1.06 * max(1.0, *values)

    @property
    def numbers(self) -> list[int]:
        """The whole numbers that have a point."""
        return sorted({x for one in self.drawn for x, _ in one.points})

    def across(self, x: int, series: Series | None = None) -> float:
        """The place of x, moved a little if several series have intervals."""
        low, high = self.numbers[0] - 0.3, self.numbers[-1] + 0.3
        place = LEFT + (x - low) / (high - low) * (RIGHT - LEFT)
        marked = [one for one in self.drawn if any(y.low is not None for _, y in one.points)]
        if series in marked:
            place += (marked.index(series) - (len(marked) - 1) / 2) * WHISKERS_APART
        return round(place, 1)

    def up(self, value: float) -> float:
        """The place of a value."""
        return round(BOTTOM - value / self.high * (BOTTOM - TOP), 1)

    @property
    def ticks(self) -> list[float]:
        """About five round numbers from 0 to the highest value."""
        about = self.high / 5
        power = 10.0 ** math.floor(math.log10(about))
        step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= about * (1 - 1e-9))
        return [round(n * step, 12) for n in range(math.floor(self.high / step + 1e-9) + 1)]

    @property
    def labels(self) -> list[int]:
        """The numbers below the chart, as many as there is room for."""
        shown: list[int] = []
        for number in self.numbers:
            if not shown or self.across(number) - self.across(shown[-1]) >= NUMBERS_APART:
                shown.append(number)
        return shown


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of segments (name, color, length). heading: of the bar's group."""

    label: str
    segments: Sequence[tuple[str, str, float]]
    interval: str = ""
    heading: str = ""

    @property
    def length(self) -> float:
        """Of all segments."""
        return sum(length for _, _, length in self.segments)


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars from 0 on, each with its total and the total's interval."""

    title: str
    text: str
    drawn: Sequence[Bar]
    unit: str = ""
    legend: Sequence[Series] = ()

    @property
    def longest(self) -> float:
        """The length of the longest bar."""
        return max(bar.length for bar in self.drawn) or 1.0


Chart = Lines | Bars


def charts(analysis: Measured) -> list[Chart]:
    """Return the charts that the figures suffice for."""
    if isinstance(analysis, Throughput):
        drawn: list[Chart] = [_throughput(analysis.methods)]
    else:
        drawn = [draw(analysis) for draw in (_speedup, _acceptance, _parts, _costs, _categories)]
    return [chart for chart in drawn if chart.drawn]


def _throughput(methods: Sequence[FileFigures]) -> Chart:
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
    return Lines("Throughput", text, ("texts at a time", "tokens per second"), series, top)


def _speedup(analysis: Analysis) -> Chart:
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
    return Lines("Speedup by draft length", text, axes, series)


def _acceptance(analysis: Analysis) -> Chart:
    series = []
    for family, methods in _fixed(analysis):
        longest = max(methods, key=lambda one: len(one.acceptance))
        shares = map(Value, longest.acceptance)
        series.append(Series(longest.name, family, list(enumerate(shares, start=1))))
    text = "Share of rounds in which this drafted token and all before it were accepted."
    axes = ("position in the draft", "share")
    return Lines("Acceptance by position", text, axes, series, top=1.0)


def _parts(analysis: Analysis) -> Chart:
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
    return Bars("Where a round's time goes", text, bars, " ms", legend)


def _costs(analysis: Analysis) -> Chart:
    costs, step = analysis.costs or PassCosts(None, {}), analysis.plain_step
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
    return Lines("What a pass costs", text, ("tokens in the pass", "plain steps"), series)


def _categories(analysis: Analysis) -> Chart:
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
    return Bars("By category of prompts", text, bars)


def _fixed(analysis: Analysis) -> Iterator[tuple[str, list[Figures]]]:
    """Methods with a draft length, by family."""
    for family in dict.fromkeys(one.family for one in analysis.methods):
        methods = [one for one in analysis.methods if one.family == family]
        methods = [one for one in methods if one.num_draft not in (0, "auto")]
        if methods:
            yield family, methods
