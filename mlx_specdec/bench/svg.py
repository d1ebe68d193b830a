"""Line and bar charts as SVG text.

Colors are CSS variables named
--c-NAME, so that a page can give them other values in the dark; every mark tells its figures in a
<title>, which browsers show as a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 560
HEIGHT = 300
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 42
BAR, BAR_GAP, GROUP_GAP = 16, 3, 12
CHARACTER = 6.7
"""Pixels of an average character in the charts' font size."""
WHISKERS_APART = 5.0
"""Pixels between the marks of two series at one x, so that their intervals can be told apart."""


@dataclass(frozen=True)
class Point:
    """A mark; low and high: ends of its interval, where it has one."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Points joined by a line; color: a name; dashed ones are drawn without marks."""

    name: str
    color: str
    points: Sequence[Point]
    dashed: bool = False


@dataclass(frozen=True)
class Bar:
    """A horizontal bar of one or more segments: (name, color, length)."""

    label: str
    segments: Sequence[tuple[str, str, float]]
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Group:
    """Bars under one heading, which may be empty."""

    heading: str
    bars: Sequence[Bar]


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
    across = _Scale(
        min(p.x for p in points) - 0.3, max(p.x for p in points) + 0.3, LEFT, WIDTH - RIGHT
    )
    values = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    low, high = y_range or _padded(min([0.0, *values]), max(values))
    up = _Scale(low, high, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(up, base), *_whole_numbers(across, points)]
    parts += [_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, x_label, "label", "middle")]
    parts += [_text(0, 0, y_label, "label", "middle", f"translate(11 {HEIGHT / 2}) rotate(-90)")]
    marked = [one for one in series if any(point.low is not None for point in one.points)]
    for one in series:
        place = marked.index(one) - (len(marked) - 1) / 2 if one in marked else 0.0
        parts += _line(one, across, up, place * WHISKERS_APART)
    return _svg(HEIGHT, f"{y_label} by {x_label}", parts)


def bar_chart(
    groups: Sequence[Group], *, x_label: str, base: float | None = None, unit: str = ""
) -> str:
    """Horizontal bars from 0 on, with the total at the end of each."""
    bars = [bar for group in groups for bar in group.bars]
    left = 14 + CHARACTER * max(len(bar.label) for bar in bars)
    totals = [sum(length for _, _, length in bar.segments) for bar in bars]
    ends = [max(total, bar.high or 0.0) for total, bar in zip(totals, bars, strict=True)]
    # Room for the figures behind the longest bar.
    across = _Scale(0.0, max([*ends, base or 0.0]) or 1.0, left, WIDTH - RIGHT - 46)
    parts: list[str] = []
    top = float(TOP)
    for group in groups:
        if group.heading:
            parts.append(_text(left, top + 11, group.heading, "heading"))
            top += 19
        for bar in group.bars:
            parts += _bar(bar, top, left, across, unit)
            top += BAR + BAR_GAP
        top += GROUP_GAP
    height = top + BOTTOM - GROUP_GAP
    if base is not None:
        parts.append(_rule(across(base), TOP, across(base), top - GROUP_GAP, "base"))
    for value in ticks(0.0, across.high):
        parts.insert(0, _rule(across(value), TOP, across(value), top - GROUP_GAP, "grid"))
        parts.append(_text(across(value), top + 4, f"{value:g}", "tick", "middle"))
    parts.append(_text((left + WIDTH - RIGHT - 46) / 2, height - 6, x_label, "label", "middle"))
    return _svg(height, x_label, parts)


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


@dataclass(frozen=True)
class _Scale:
    """Values low .. high -> pixels start .. end."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)


def _padded(low: float, high: float) -> tuple[float, float]:
    return low, high + 0.06 * ((high - low) or 1.0)


def _grid(up: _Scale, base: float | None) -> Iterator[str]:
    for value in ticks(up.low, up.high):
        yield _rule(LEFT, up(value), WIDTH - RIGHT, up(value), "grid")
        yield _text(LEFT - 6, up(value) + 4, f"{value:g}", "tick", "end")
    if base is not None:
        yield _rule(LEFT, up(base), WIDTH - RIGHT, up(base), "base")


def _whole_numbers(across: _Scale, points: Sequence[Point]) -> Iterator[str]:
    shown = sorted({round(point.x) for point in points})
    room = (across.end - across.start) / (across.high - across.low)
    last = -math.inf
    for value in shown:
        if (value - last) * room >= 20:
            yield _text(across(value), HEIGHT - BOTTOM + 17, str(value), "tick", "middle")
            last = value


def _line(series: Series, across: _Scale, up: _Scale, aside: float) -> Iterator[str]:
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


def _bar(bar: Bar, top: float, left: float, across: _Scale, unit: str) -> Iterator[str]:
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
    end = start
    if bar.low is not None and bar.high is not None:
        end = max(start, bar.high)
        yield (
            f'<path class="error" d="M{across(bar.low):.1f} {middle:.1f}H{across(bar.high):.1f}"/>'
        )
    yield _text(across(end) + 6, middle + 4, f"{start:.2f}{unit}", "value")


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
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(parts)
        + "</svg>"
    )
