"""Line charts as SVG, bar charts as HTML tables.

Colors are CSS variables named --c-NAME, so that a page can give them other values in the dark;
every mark has its figures in a <title>, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from .analysis import Value

WIDTH = 560
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 42
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be told apart."""
NUMBERS_APART = 20
"""Pixels between two numbers of an axis, at least."""

Scale = Callable[[float], float]
"""A value to its place in pixels."""


@dataclass(frozen=True)
class Series:
    """Points (x, y) joined by a line. color: a name. dashed: with smaller marks."""

    name: str
    color: str
    points: Sequence[tuple[int, Value]]
    dashed: bool = False


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


def line_chart(series: Sequence[Series], axes: tuple[str, str], top: float | None = None) -> str:
    """Return lines over whole numbers, from 0 on, as SVG. axes: names of x and y. top: the highest
    value; without it the points decide, and there is a stronger line at 1."""
    x_label, y_label = axes
    points = [point for one in series for point in one.points]
    numbers = sorted({x for x, _ in points})
    across = _scale(numbers[0] - 0.3, numbers[-1] + 0.3, LEFT, WIDTH - RIGHT)
    high = top or 1.06 * max(1.0, *(y.high or y.value for _, y in points))
    up = _scale(0.0, high, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in ticks(high):
        parts.append(_rule(LEFT, up(value), WIDTH - RIGHT, up(value), "grid"))
        parts.append(_text(LEFT - 6, up(value) + 4, f"{value:g}", "tick", "end"))
    if top is None:
        parts.append(_rule(LEFT, up(1.0), WIDTH - RIGHT, up(1.0), "base"))
    last = -math.inf
    for number in numbers:
        if across(number) - last >= NUMBERS_APART:
            last = across(number)
            parts.append(_text(last, HEIGHT - BOTTOM + 17, str(number), "tick", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "label", "middle"))
    parts.append(_text(0, 0, y_label, "label", "middle", f"translate(11 {HEIGHT / 2}) rotate(-90)"))
    marked = [one for one in series if any(y.low is not None for _, y in one.points)]
    for one in series:
        place = marked.index(one) - (len(marked) - 1) / 2 if one in marked else 0.0
        parts += _line(one, across, up, place * WHISKERS_APART)
    label = escape(f"{y_label} by {x_label}")
    begin = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
    return begin + "".join(parts) + "</svg>"


def bar_chart(bars: Sequence[Bar], unit: str = "") -> str:
    """Return horizontal bars from 0 on, each with its total and the total's interval, as HTML."""
    longest = max(bar.length for bar in bars) or 1.0
    rows, heading = [], ""
    for bar in bars:
        if bar.heading != heading:
            heading = bar.heading
            rows.append(f'<tr><th colspan="3">{escape(heading)}</th></tr>')
        pieces = "".join(
            f'<i style="{color(shade)};width:{max(0.0, 100 * length / longest):.1f}%" '
            f'title="{escape(name or bar.label)}: {length:.2f}{unit}"></i>'
            for name, shade, length in bar.segments
        )
        figure = f"{bar.length:.2f}{unit}" + (f" ({bar.interval})" if bar.interval else "")
        rows.append(f"<tr><td>{escape(bar.label)}</td><td>{pieces}</td><td>{figure}</td></tr>")
    return f'<table class="bars">{"".join(rows)}</table>'


def color(name: str) -> str:
    """Return CSS that gives a mark the color of that name, or the one of none."""
    return f"--c:var(--c-{escape(name)}, var(--c-none))"


def ticks(high: float, about: int = 5) -> list[float]:
    """Return about so many round numbers from 0 to `high`."""
    power = 10.0 ** math.floor(math.log10(high / about))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= high / about * (1 - 1e-9))
    return [round(index * step, 12) for index in range(math.floor(high / step + 1e-9) + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Values low .. high -> pixels start .. end."""
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _line(series: Series, across: Scale, up: Scale, aside: float) -> Iterator[str]:
    style = f'style="{color(series.color)}"'
    path = " ".join(f"{across(x) + aside:.1f},{up(y.value):.1f}" for x, y in series.points)
    kind = "line dashed" if series.dashed else "line"
    yield f'<polyline class="{kind}" {style} points="{path}"/>'
    for number, y in series.points:
        x = across(number) + aside
        note = f"{series.name}, {number}: {y.value:.2f}"
        if y.low is not None and y.high is not None:
            note += f" ({y.interval})"
            yield f'<path class="whisker" {style} d="M{x:.1f} {up(y.low):.1f}V{up(y.high):.1f}"/>'
        radius = 2.5 if series.dashed else 4
        yield (
            f'<circle class="mark" {style} cx="{x:.1f}" cy="{up(y.value):.1f}" r="{radius}">'
            f"<title>{escape(note)}</title></circle>"
        )


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(
    x: float, y: float, text: str, kind: str, anchor: str = "start", transform: str = ""
) -> str:
    turned = f' transform="{transform}"' if transform else ""
    return (
        f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{turned}>'
        f"{escape(text)}</text>"
    )
