"""The table of bench: no name is cut, however narrow the terminal."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec.cli import bench
from mlx_specdec.measure.analysis import Estimate, SpeedUp

from ..support.commands import Run, Terminal, told

NAMES = ("plain", "draft auto", "mlx-lm draft 3", "transformers draft 8")


def figures(name: str) -> Any:
    family = name.split()[0]
    ratio = SpeedUp(Estimate(1.5, 1.25, 1.75), Estimate(1.5, 1.25, 1.75))
    return SimpleNamespace(
        name=name,
        family=family,
        num_draft=name.split()[-1],
        tokens_per_second=201.2,
        speed_up=ratio,
        tokens_per_round=1.91,
        acceptance_rate=0.5,
        predicted=1.36,
        compared=90,
        differences=(),
    )


def table(monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    """As a terminal of so many columns shows it, without styles."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    analysis: Any = SimpleNamespace(
        methods=[figures(name) for name in NAMES],
        texts=30,
        repeats=3,
        skipped={},
        interrupted=False,
    )
    setting: Any = SimpleNamespace(
        model="t5",
        draft_model=None,
        dtype="float32",
        temperature=0.0,
        simulated_acceptance=None,
        device="cpu",
        blas="mkl",
        notes=(),
    )
    terminal = Terminal()
    bench.show(analysis, setting, terminal)
    return re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("columns", [45, 60, 80, 100, 120])
def test_no_name_and_no_figure_is_cut(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    shown = table(monkeypatch, columns)
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= columns
    for name in NAMES:
        rows = [line for line in shown.splitlines() if "201.2" in line]
        (row,) = [line for line in rows if line.strip().startswith(name)]
        assert "1.50" in row or name == "plain"
    assert "draft auto is fastest: 1.50 times plain decoding." in " ".join(shown.split())


def test_wide_terminals_show_every_column(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = table(monkeypatch, 120)
    for heading in ("interval", "median", "predicted", "length", "rate", "same"):
        assert heading in shown
        assert heading not in table(monkeypatch, 45)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a place where nobody writes")
def test_a_report_that_cannot_be_written_is_told_before_measuring(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\n", encoding="utf-8")
    done = run("bench", file, "--model", "/nowhere", "--report", "/proc/self/report.html")
    told(done, "report cannot be written to /proc/self")
