"""Writes a benchmark as one HTML file, which needs no network.

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
"""Edges of a line chart in pixels."""
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be distinguished."""
NUMBERS_APART = 20
"""Minimum distance between two numbers of an axis, in pixels."""
ONE_COUNTS = (
    "one counts with the median of its repeats, without its prompt pass. Intervals by bootstrap "
    "over sequences, from five on"
)
ALL_COUNT = "the time of all together counts, prompt passes included, as the median of the repeats"


def write_report(analysis: Measured, setting: Setting, file: Path) -> None:
    """Write the page. Raises OutputError if the file cannot be written."""
    try:
        file.write_text(page(analysis, setting), encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Measured, setting: Setting) -> str:
    """Return the HTML page, which also contains the figures as JSON."""
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
        f"{method.name}, prompt {found.prompt + 1}, token {found.position}"
        + ("" if found.margin is None else f", margin {found.margin:.3g}")
        + (", a tie" if found.tie else "")
        for method in analysis.methods
        for found in method.differences
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
    """Return a sentence with the speedup, the machine, and the number of equal outputs."""
    machine = setting.machine if setting.device == "cpu" else setting.device
    first = verdict(analysis).partition(";")[0].rstrip(".") or "Plain decoding was measured"
    if isinstance(analysis, Throughput):
        return f"On {machine}: {first}."
    methods = [method for method in analysis.methods if method.acceptance_rate is not None]
    best, compared = fastest(methods), sum(method.compared for method in methods)
    if best is None or overall(best) <= 1:
        return f"On {machine}: {first}."
    gain = f"rafts made {_short(setting.model)} {overall(best):.2f} times as fast on {machine}"
    if setting.simulated_acceptance is not None:
        return f"Simulated d{gain}."
    if setting.lossy or not compared:
        return f"D{gain}."
    same = compared - sum(len(method.differences) for method in methods)
    return f"D{gain}; {same} of {compared} texts are plain decoding's own."


def _picture_bars(analysis: Measured) -> list[tuple[str, float, str, bool]]:
    """Return a label, a relative length, a value and whether it is the best, for each bar.

    There are bars for all methods of a throughput. Otherwise, there are bars for plain decoding and
    for the best fixed draft length and the automatic draft length of each family.
    """
    chosen: dict[object, tuple[float, str]] = {}
    for method in analysis.methods:
        if isinstance(method, FileFigures):
            chosen[method.name] = method.tokens_per_second or 0.0, method.name
        else:
            value = 1.0 if method.family == "plain" else overall(method)
            key = method.family, method.num_draft == "auto"
            chosen[key] = max(chosen.get(key, (0.0, "")), (value, method.name))
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
    """Points (x, y) that are joined by a line. A dashed line has smaller marks."""

    name: str
    color: str
    points: Sequence[tuple[int, Value]]
    dashed: bool = False


@dataclass(frozen=True)
class Lines:
    """A chart of lines over integers, whose methods return places in pixels.

    Attributes:
        axes: The names of x and y.
        top: The highest value of the y axis. With None, the points decide, and the line at 1 is
            stronger.
    """

    title: str
    text: str
    axes: tuple[str, str]
    series: Sequence[Series]
    top: float | None = None

    @property
    def drawn(self) -> list[Series]:
        """The series that have points."""
        return [series for series in self.series if series.points]

    @property
    def high(self) -> float:
        """The highest value of the y axis."""
        values = [y.high or y.value for series in self.drawn for _, y in series.points]
        return self.top or 1.06 * max(1.0, *values)

    @property
    def numbers(self) -> list[int]:
        """The integers that have a point."""
        return sorted({x for series in self.drawn for x, _ in series.points})

    def across(self, x: int, series: Series | None = None) -> float:
        """Return the place of x, which is shifted a little if several series have intervals."""
        low, high = self.numbers[0] - 0.3, self.numbers[-1] + 0.3
        place = LEFT + (x - low) / (high - low) * (RIGHT - LEFT)
        marked = [
            series for series in self.drawn if any(y.low is not None for _, y in series.points)
        ]
        if series in marked:
            place += (marked.index(series) - (len(marked) - 1) / 2) * WHISKERS_APART
        return round(place, 1)

    def up(self, value: float) -> float:
        """Return the place of a value."""
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
        """The numbers below the chart. Some are left out if there is no room."""
        shown: list[int] = []
        for number in self.numbers:
            if not shown or self.across(number) - self.across(shown[-1]) >= NUMBERS_APART:
                shown.append(number)
        return shown


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of segments (name, color, length). `heading` is the title of its group."""

    label: str
    segments: Sequence[tuple[str, str, float]]
    interval: str = ""
    heading: str = ""

    @property
    def length(self) -> float:
        """The length of all segments together."""
        return sum(length for _, _, length in self.segments)


@dataclass(frozen=True)
class Bars:
    """A chart of horizontal bars. Every bar has a total and its interval."""

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
    """Return the charts for which there are figures."""
    if isinstance(analysis, Throughput):
        drawn: list[Chart] = [_throughput(analysis.methods)]
    else:
        drawn = [draw(analysis) for draw in (_speedup, _acceptance, _parts, _costs, _categories)]
    return [chart for chart in drawn if chart.drawn]


def _throughput(methods: Sequence[FileFigures]) -> Chart:
    series = []
    for family in dict.fromkeys(method.family for method in methods):
        points = [
            (method.batch_size, Value(method.tokens_per_second))
            for method in methods
            if method.family == family and method.tokens_per_second is not None
        ]
        series.append(Series(family, "none" if family == "plain" else family, points))
    text = "Generated tokens per second of the whole file, the prompts' time included."
    top = 1.06 * max(method.tokens_per_second or 0.0 for method in methods)
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
    learned = [
        method for method in analysis.methods if method.num_draft == "auto" and method.speed_up
    ]
    if learned:
        ratios = ", ".join(f"{method.name}: {overall(method):.2f}" for method in learned)
        text += f" Chosen while decoding: {ratios}."
    axes = ("tokens drafted a round", "speedup")
    return Lines("Speedup by draft length", text, axes, series)


def _acceptance(analysis: Analysis) -> Chart:
    series = []
    for family, methods in _fixed(analysis):
        longest = max(methods, key=lambda method: len(method.acceptance))
        shares = map(Value, longest.acceptance)
        series.append(Series(longest.name, family, list(enumerate(shares, start=1))))
    text = "Share of rounds in which this drafted token and all before it were accepted."
    axes = ("position in the draft", "share")
    return Lines("Acceptance by position", text, axes, series, top=1.0)


def _parts(analysis: Analysis) -> Chart:
    bars = [
        Bar(method.name, [(part, part, getattr(method.parts, part) * 1e3) for part in PARTS])
        for method in analysis.methods
        if method.parts is not None
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
        (method.num_draft + 1, Value(method.parts.verify / step))
        for method in analysis.methods
        if method.parts is not None and method.family == "draft" and method.num_draft != "auto"
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
    shown += [method for method in analysis.methods if method.num_draft == "auto"]
    bars = [
        Bar(method.name, [("", method.family, ratio.value)], ratio.interval, category)
        for category in dict.fromkeys(name for method in shown for name in method.by_category)
        for method in shown
        if category in method.by_category and (ratio := method.by_category[category].overall)
    ]
    text = (
        "Tokens per second over plain decoding's, with 95 % intervals from 5 sequences on, of each "
        "proposer's and program's best length and of what was chosen while decoding."
    )
    return Bars("By category of prompts", text, bars)


def _fixed(analysis: Analysis) -> Iterator[tuple[str, list[Figures]]]:
    """Yield the methods with a fixed draft length by family."""
    for family in dict.fromkeys(method.family for method in analysis.methods):
        methods = [method for method in analysis.methods if method.family == family]
        methods = [method for method in methods if method.num_draft not in (0, "auto")]
        if methods:
            yield family, methods
