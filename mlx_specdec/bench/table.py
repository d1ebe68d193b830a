"""What a benchmark came to in words: one sentence, and a row of cells for every method."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .analysis import Analysis, Figures, fastest, overall
from .setting import Setting

COLUMNS = (
    "method",
    "tokens/s",
    "speedup",
    "95 % interval",
    "median sequence",
    "predicted",
    "acceptance length",
    "acceptance rate",
    "same text",
)


def as_dict(analysis: Analysis, setting: Setting) -> dict[str, Any]:
    """All figures and what they were taken with, as plain dictionaries and lists, for JSON."""
    return {"setting": asdict(setting), **asdict(analysis)}


def verdict(analysis: Analysis) -> str:
    """What a reader wants to know first, in a sentence; empty where nothing but plain decoding ran.

    The length that was chosen while decoding is held against the best.
    """
    best = fastest(analysis.methods[1:])
    if best is None:
        return ""
    if overall(best) <= 1:
        return (
            f"Nothing is faster than plain decoding; {best.name} comes closest with "
            f"{overall(best):.2f} of its speed."
        )
    auto = fastest(one for one in analysis.methods if one.num_draft == "auto")
    text = f"{best.name} is fastest: {overall(best):.2f} times plain decoding"
    if auto is not None and auto is not best:
        text += f"; {auto.name} reaches {overall(auto) / overall(best):.2f} of it"
    return text + "."


def cells(one: Figures) -> tuple[str, ...]:
    """A method's figures, one for each of COLUMNS; empty where there is none."""
    is_plain = one.family == "plain"
    same = "" if is_plain else "not promised"
    if one.compared and not is_plain:
        same = f"{one.compared - len(one.differences)} of {one.compared}"
    speedup, interval, per_text = ("1", "", "") if is_plain else ("", "", "")
    if one.speed_up is not None and not is_plain:
        ratio = one.speed_up.overall
        speedup, interval = f"{ratio.value:.2f}", ratio.interval
        per_text = f"{one.speed_up.per_text.value:.2f}"
    return (
        one.name,
        _number(one.tokens_per_second, ".1f"),
        speedup,
        interval,
        per_text,
        _number(one.predicted, ".2f"),
        _number(one.tokens_per_round, ".2f"),
        _number(one.acceptance_rate, ".0%"),
        same,
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
