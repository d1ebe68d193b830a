"""A benchmark as a table, sentences and charts, which the terminal and the report show."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

LEFT, RIGHT, TOP, BOTTOM = 46, 546, 12, 258
"""Edges of a line chart in pixels."""
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be distinguished."""
NUMBERS_APART = 20
"""Minimum distance between two numbers of an axis, in pixels."""


@dataclass(frozen=True)
class Value:
    """A figure and its 95 % confidence interval, if there is one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        """The interval as text, or an empty string if there is none."""
        none = self.low is None or self.high is None
        return "" if none else f"{self.low:.2f} to {self.high:.2f}"


class MethodFigures(Protocol):
    """The figures of a method. `gain` is its speedup, or 0 if there is none."""

    @property
    def gain(self) -> float: ...
    def cells(self) -> Mapping[str, str]: ...


T = TypeVar("T", bound=MethodFigures)


def fastest(methods: Iterable[T]) -> T | None:
    """Return the method with the highest speedup, if any has one."""
    return max((method for method in methods if method.gain), key=lambda m: m.gain, default=None)


@dataclass(frozen=True)
class Table:
    """A table with a row for every method. `best` is the index of the fastest method's row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None

    @classmethod
    def of(cls, methods: Sequence[MethodFigures]) -> "Table":
        """Return the table of all figures. A cell without a figure is empty."""
        rows, best = [method.cells() for method in methods], fastest(methods)
        place = next((at for at, method in enumerate(methods) if method is best), None)
        return cls(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), place)


def figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def same_text(compared: int, differences: Sequence[object]) -> str:
    return f"{compared - len(differences)} of {compared}" if compared else "not promised"


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

    def across(self, x: int, series: Series | None = None) -> float:
        """Return the place of x, which is shifted a little if several series have intervals."""
        numbers = [x for series in self.drawn for x, _ in series.points]
        low, high = min(numbers) - 0.3, max(numbers) + 0.3
        place = LEFT + (x - low) / (high - low) * (RIGHT - LEFT)
        marked = [one for one in self.drawn if any(y.interval for _, y in one.points)]
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
        for x in sorted({x for series in self.drawn for x, _ in series.points}):
            if not shown or self.across(x) - self.across(shown[-1]) >= NUMBERS_APART:
                shown.append(x)
        return shown


@dataclass(frozen=True)
class ChartBar:
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
    drawn: Sequence[ChartBar]
    unit: str = ""
    legend: Sequence[Series] = ()

    @property
    def longest(self) -> float:
        """The length of the longest bar."""
        return max(bar.length for bar in self.drawn) or 1.0


@dataclass(frozen=True)
class Presentation:
    """The parts of a benchmark that the terminal and the report show.

    Attributes:
        title: The subject of the report.
        counts: A phrase that says which time is compared.
        unit: The unit of the bars.
        table: The figures of all methods.
        verdict: A sentence on the fastest method, or "" if only plain decoding ran.
        bars: Names, lengths and values in words, for the picture of the report.
        charts: The charts for which there are figures.
        gain: The highest speedup by drafts, if there is one.
        compared, same: The number of outputs of methods with drafts that were compared with plain
            decoding, and the number of those that were equal.
    """

    title: str
    counts: str
    unit: str
    table: Table
    verdict: str
    bars: Sequence[tuple[str, float, str]]
    charts: Sequence[Lines | Bars]
    gain: float | None = None
    compared: int = 0
    same: int = 0
