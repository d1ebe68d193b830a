"""What is said while something takes long."""

import io
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from mlx_specdec.cli import loading, render
from mlx_specdec.engine import loading as engine_loading

from ..support.shipped import ROOT

SOURCE = ROOT / "tests" / "fixtures" / "t5" / "umt5-tied"


def wait_until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines on standard error. The time after which silence is broken is over at once."""
    told: list[str] = []
    render.silence(False)
    monkeypatch.setattr(render, "tell", told.append)
    monkeypatch.setattr(render, "A_LINE_AFTER", 0.0)
    return told


def test_a_long_silence_is_broken_by_one_line(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with render.slowly("loading weights"):
        wait_until(lambda: bool(lines))
    assert lines == ["loading weights"]
    monkeypatch.setattr(render, "A_LINE_AFTER", 3600.0)
    with render.slowly("loading more"):
        pass
    assert lines == ["loading weights"]


def test_a_bar_that_is_shown_gets_a_label_instead(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []
    monkeypatch.setattr(render._Signs, "bar", staticmethod(labels.append))
    with render.slowly("comparing"):
        wait_until(lambda: bool(labels))
    assert labels == ["comparing"] and not lines


def test_both_models_are_named_while_they_load_without_a_terminal(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded:
        notes = ("a note",)

    def load(*names: Any, **settings: Any) -> Loaded:
        wait_until(lambda: bool(lines))
        return Loaded()

    monkeypatch.setattr(engine_loading, "load", load)
    loading.load_pair("target.gguf", "draft.gguf")
    assert lines == ["loading target.gguf and draft.gguf", "a note"]


@pytest.mark.parametrize(
    ("in_bytes", "lines"),
    [
        (True, ["converting: 1.0 GB of 9.0 GB", "checking: 6.0 GB of 9.0 GB"]),
        (False, ["converting: 1000000000 of 9000000000", "checking: 6000000000 of 9000000000"]),
    ],
)
def test_without_a_terminal_there_is_a_line_after_two_seconds_and_one_a_minute(
    in_bytes: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, clock = io.StringIO(), iter([0.0, 3.0, 3.0, 60.0, 62.0, 64.0, 64.0])
    render.silence(False)
    monkeypatch.setattr(sys, "stderr", stream)
    with render.progress("converting", in_bytes=in_bytes, clock=clock.__next__) as report:
        for done in (1, 2, 3):
            report(done * 10**9, 9 * 10**9)
        report(6 * 10**9, 9 * 10**9, "checking")
        report(9 * 10**9, 9 * 10**9)
    assert stream.getvalue().splitlines() == lines
