"""The progress bar on a terminal."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from mlx_specdec import generate, load, stream_generate
from mlx_specdec.cli import render

from ..support.commands import Terminal


@pytest.mark.parametrize("in_bytes", [True, False])
def test_a_bar_in_bytes_says_how_many_and_how_long(
    monkeypatch: pytest.MonkeyPatch, in_bytes: bool
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with render.progress("converting", in_bytes=in_bytes) as report:
        report(1_500_000_000, 6_000_000_000)
    shown = terminal.getvalue()
    assert "converting" in shown and ":--" in shown
    assert ("1.5/6.0 GB" in shown) is in_bytes


def test_of_two_bars_one_shows_at_a_time_with_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    with (
        render.progress("downloading", in_bytes=True) as first,
        render.progress("converting", in_bytes=True) as second,
    ):
        first(0, 2000)
        first(1000, 2000)
        first(2000, 2000)
        downloaded = terminal.getvalue()
        second(1000, 3000)
    rest = terminal.getvalue()[len(downloaded) :]
    assert "downloading" in downloaded and "/s" in downloaded and "converting" not in downloaded
    assert "converting" in rest and "downloading" not in rest


def test_nothing_is_drawn_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress("converting", in_bytes=True) as report:
        report(1, 2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(
    ("in_bytes", "lines"),
    [
        (True, ["converting: 2.0 GB of 9.0 GB", "checking: 6.0 GB of 9.0 GB"]),
        (False, ["converting: 2000000000 of 9000000000", "checking: 6000000000 of 9000000000"]),
    ],
)
def test_without_a_terminal_there_is_a_line_a_minute(
    in_bytes: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, clock = io.StringIO(), iter([0.0, 59.0, 60.0, 60.0, 119.0, 150.0, 150.0])
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress("converting", in_bytes=in_bytes, clock=clock.__next__) as report:
        for done in (1, 2, 3):
            report(done * 10**9, 9 * 10**9)
        report(6 * 10**9, 9 * 10**9, "checking")
        report(9 * 10**9, 9 * 10**9)
    assert stream.getvalue().splitlines() == lines


def test_a_long_prompt_is_read_in_view_and_may_be_interrupted(t5: Path) -> None:
    pair = load(t5)
    seen: list[tuple[int, int]] = []
    run = stream_generate(pair, [5, 6, 1], progress=lambda done, total: seen.append((done, total)))
    assert seen == []
    run.read_prompt()
    assert seen == [(0, 3), (3, 3)]
    assert run.result().tokens == generate(pair, [5, 6, 1]).tokens
    interrupted = stream_generate(pair, [5, 6, 1])
    interrupted.interrupt()
    interrupted.read_prompt()
    assert interrupted.result().finish_reason == "interrupted"
    assert interrupted.result().tokens == ()
