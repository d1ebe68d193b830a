"""Line and bar charts as SVG text.

Colors are CSS variables named --c-NAME, so that a page can give them other values in the dark;
every mark tells its figures in a <title>, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 560
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 42
BAR, BAR_GAP, GROUP_GAP = 16, 3, 12
FIGURES = 46
"""Pixels for the figures behind the longest bar."""
CHARACTER = 6.7
"""Pixels of an average character in the charts' font size."""
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be told apart."""
NUMBERS_APART = 20

Scale = Callable[[float], float]
"""A value to its place in pixels."""


@dataclass(frozen=True)
class Point:
    """A mark; low and high: ends of its interval, where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points joined by a line; color: a name; dashed ones are drawn with smaller marks."""

    name: str
    color: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of segments (name, color, length); heading: of the group that it is in."""

    label: str
    segments: Sequence[tuple[str, str, float]]
    low: float | None = None
    high: float | None = None
    heading: str = ""

    @property
    def length(self) -> float:
        """Of all segments."""
        return sum(length for _, _, length in self.segments)


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    base: float | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Lines over whole numbers; base: a value to draw a stronger line at."""
    points = [point for one in series for point in one.points]
    numbers = sorted({round(point.x) for point in points})
    across = _scale(numbers[0] - 0.3, numbers[-1] + 0.3, LEFT, WIDTH - RIGHT)
    values = [0.0, *(v for p in points for v in (p.y, p.low, p.high) if v is not None)]
    low, high = y_range or (min(values), max(values) + 0.06 * (max(values) - min(values) or 1.0))
    up = _scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = []
    for value in ticks(low, high):
        parts.append(_rule(LEFT, up(value), WIDTH - RIGHT, up(value), "grid"))
        parts.append(_text(LEFT - 6, up(value) + 4, f"{value:g}", "tick", "end"))
    if base is not None:
        parts.append(_rule(LEFT, up(base), WIDTH - RIGHT, up(base), "base"))
    last = -math.inf
    for number in numbers:
        if across(number) - last >= NUMBERS_APART:
            last = across(number)
            parts.append(_text(last, HEIGHT - BOTTOM + 17, str(number), "tick", "middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "label", "middle"))
    parts.append(_text(0, 0, y_label, "label", "middle", f"translate(11 {HEIGHT / 2}) rotate(-90)"))
    marked = [one for one in series if any(point.low is not None for point in one.points)]
    for one in series:
        place = marked.index(one) - (len(marked) - 1) / 2 if one in marked else 0.0
        parts += _line(one, across, up, place * WHISKERS_APART)
    return _svg(HEIGHT, f"{y_label} by {x_label}", parts)


def bar_chart(
    bars: Sequence[Bar], *, x_label: str, base: float | None = None, unit: str = ""
) -> str:
    """Horizontal bars from 0 on, with the total at the end of each."""
    left, right = 14 + CHARACTER * max(len(bar.label) for bar in bars), WIDTH - RIGHT - FIGURES
    longest = max(base or 0.0, *(max(bar.length, bar.high or 0.0) for bar in bars)) or 1.0
    across = _scale(0.0, longest, left, right)
    parts: list[str] = []
    top, heading = float(TOP), ""
    for bar in bars:
        if bar.heading != heading:
            top += GROUP_GAP if heading else 0
            heading = bar.heading
            parts.append(_text(left, top + 11, heading, "heading"))
            top += 19
        parts += _bar(bar, top, left, across, unit)
        top += BAR + BAR_GAP
    if base is not None:
        parts.append(_rule(across(base), TOP, across(base), top, "base"))
    for value in ticks(0.0, longest):
        parts.insert(0, _rule(across(value), TOP, across(value), top, "grid"))
        parts.append(_text(across(value), top + 16, f"{value:g}", "tick", "middle"))
    parts.append(_text((left + right) / 2, top + BOTTOM - 6, x_label, "label", "middle"))
    return _svg(top + BOTTOM, x_label, parts)


def color(name: str) -> str:
    """CSS that gives a mark the color of that name, or the one of none."""
    return f"--c:var(--c-{escape(name)}, var(--c-none))"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers within the range, about as many as asked for."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(s * power for s in (1, 2, 2.5, 5, 10) if s * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Values low .. high -> pixels start .. end."""
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def _line(series: Series, across: Scale, up: Scale, aside: float) -> Iterator[str]:
    style = f'style="{color(series.color)}"'
    path = " ".join(f"{across(p.x) + aside:.1f},{up(p.y):.1f}" for p in series.points)
    kind = "line dashed" if series.dashed else "line"
    yield f'<polyline class="{kind}" {style} points="{path}"/>'
    for point in series.points:
        x, y = across(point.x) + aside, up(point.y)
        note = f"{series.name}, {point.x:g}: {point.y:.2f}"
        if point.low is not None and point.high is not None:
            low, high = up(point.low), up(point.high)
            note += f" ({point.low:.2f} to {point.high:.2f})"
            yield f'<path class="whisker" {style} d="M{x:.1f} {low:.1f}V{high:.1f}"/>'
        radius = 2.5 if series.dashed else 4
        yield (
            f'<circle class="mark" {style} cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
            f"<title>{escape(note)}</title></circle>"
        )


def _bar(bar: Bar, top: float, left: float, across: Scale, unit: str) -> Iterator[str]:
    middle, start = top + BAR / 2, 0.0
    yield _text(left - 7, middle + 4, bar.label, "name", "end")
    for name, shade, length in bar.segments:
        x, width = across(start), across(start + length) - across(start)
        note = f"{bar.label}, {name}: {length:.2f}{unit}" if name else f"{bar.label}: {length:.2f}"
        yield (
            f'<rect class="bar" style="{color(shade)}" x="{x:.1f}" y="{top:.1f}" '
            f'width="{max(0.0, width):.1f}" height="{BAR}"><title>{escape(note)}</title></rect>'
        )
        start += length
    if bar.low is not None and bar.high is not None:
        yield _rule(across(bar.low), middle, across(bar.high), middle, "error")
    end = across(max(bar.length, bar.high or 0.0))
    yield _text(end + 6, middle + 4, f"{bar.length:.2f}{unit}", "value")


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


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    begin = f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return begin + "".join(parts) + "</svg>"
