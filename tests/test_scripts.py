"""The programs in scripts/ and benchmarks/."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from .support.shipped import ROOT

sys.path.insert(0, str(ROOT / "scripts"))

import mac_checks
import mac_summary

PROGRAMS = sorted(
    file for name in ("scripts", "benchmarks") for file in (ROOT / name).rglob("*.py")
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda file: file.name)
def test_what_programs_import_is_there(program: Path) -> None:
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(
            ("mlx_specdec", "tests")
        ):
            names = ", ".join(imported.name for imported in node.names)
            exec(f"from {node.module} import {names}", {})


# MLX's CPU back end takes minutes for the 8-bit models in weights/ if their scales stay bfloat16.
@pytest.mark.cpu_only
@pytest.mark.skipif(
    mx.metal.is_available(), reason="takes ten minutes on a Mac, which has more to say"
)
def test_the_script_for_macs_runs_to_its_end_and_writes_one_file(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    done = subprocess.run(
        [ROOT / "scripts" / "mac.sh", file],
        env={**os.environ, "PIP_NO_INDEX": "1"},  # nothing is downloaded
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0 and f"wrote {file}" in done.stderr
    text = file.read_text()
    assert "(ended with code" not in text and "error:" not in text
    report = mac_summary.Report.of(text)
    assert list(report.parts) == [
        "machine",
        "memory limits",
        "bits of rows",
        "float32 products",
        "translation: plain and draft",
        "Python: plain, draft and DSpark",
        "Python with whole weights",
        *(["Python with --exact"] if "Python with --exact" in report.parts else []),
        "Python after 16 lines",
        "ways of submission",
        "sorting",
        "kernels by rows, shapes and contexts",
        "two streams",
    ]
    beginning = text[: text.index("\n== ")]
    assert beginning == mac_summary.summary(report) and len(beginning.splitlines()) < 80
    assert "not measured" not in beginning and "cannot be summarized" not in beginning
    for message in (
        "has the bits of 2 rows",
        "differ at ties",
        "got",
        "and nothing failed",
        f"All {len(report.parts)} parts ran to their ends.",
    ):
        assert message in " ".join(beginning.split())
    [memory] = report.objects["memory limits"]
    assert memory["usable"] > 0 and "mlx" in memory["versions"]
    [bench] = report.objects["Python: plain, draft and DSpark"]
    methods = [one["name"] for one in bench["methods"]]
    assert any("dspark" in name for name in methods) and "plain" in methods
    formats = {line["format"] for line in report.kind("rows") if line["operation"] == "product"}
    assert formats == set(mac_checks.FORMATS)
    [kernels] = report.objects["kernels by rows, shapes and contexts"]
    cells = kernels["cells"]
    assert {cell["kind"] for cell in cells} == {"product", "attention"}
    assert kernels["cells_left_out"] == 0
    assert all(cell["ms"] > 0 for cell in cells)
    assert all(cell.get("last_row_apart", 0) < 1e-4 for cell in cells)
    assert [cell["of_one_row"] for cell in cells if cell["rows"] == 1] == [1.0] * 5


def executable(file: Path, lines: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{lines}\n")
    file.chmod(0o755)


def script_for_macs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runner: str) -> Path:
    """Return a copy of mac.sh whose parts do nothing. runner: What the program perl does."""
    script = tmp_path / "scripts" / "mac.sh"
    executable(tmp_path / "bin" / "perl", runner)
    executable(
        tmp_path / ".venv" / "bin" / "python",
        'case "$*" in *is_available*) echo metal ;; *"bench --help"*) echo "--exact" ;; esac',
    )
    downloaded = "run.sh chat --model '/models/a model.gguf'"
    executable(script.with_name("real_models.sh"), f'echo "{downloaded}"')
    script.write_bytes((ROOT / "scripts" / "mac.sh").read_bytes())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return script


def test_the_script_for_macs_marks_the_part_that_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = 'shift 3; case "$*" in *.py" rows"*) kill -TERM $PPID ;; esac; exec "$@"'
    script = script_for_macs(tmp_path, monkeypatch, runner)
    done = subprocess.run(["bash", script, tmp_path / "report"], capture_output=True)
    report = mac_summary.Report.of((tmp_path / "report").read_text())
    assert done.returncode == 130 and list(report.parts)[-1] == "bits of rows"
    assert "bits of rows (code 130)" in mac_summary.failures(report)[0]


@pytest.mark.parametrize(("flags", "most"), [((), 600), (("--wired",), 600 + 153)])
def test_time_limits_on_a_mac_sum_to_ten_minutes_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], most: int
) -> None:
    limits, awake = tmp_path / "limits", tmp_path / "awake"
    executable(tmp_path / "bin" / "caffeinate", f'echo "$@" >>{awake}')
    runner = f'echo "$3 $*" >>{limits}; shift 3; exec "$@"'
    script = script_for_macs(tmp_path, monkeypatch, runner)
    subprocess.run(["bash", script, *flags, tmp_path / "report"], check=True, capture_output=True)
    # The code of the runner is an argument of several lines.
    lines = [line for line in limits.read_text().splitlines() if re.match(r"\d+ -e", line)]
    assert len(lines) > 15 and 500 < sum(int(line.split()[0]) for line in lines) <= most
    commands = limits.read_text()
    assert "streams --seconds 120" in commands and "--exact" in commands
    assert "mac_real.py /models/a model.gguf" in commands
    assert commands.count("--wired") == len(flags)
    deadline = time.monotonic() + 10
    while not awake.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert awake.read_text().startswith("-i ")


def bits(name: str, most: int, last: int | None = None) -> dict[str, Any]:
    """A line on products whose row 0 equals two rows up to `most` rows, and all rows to `last`."""
    equal = list(range(2, most + 1))
    return {
        "kind": "rows",
        "operation": "product",
        "format": name,
        "row_0_as_one_row": [],
        "row_0_as_two_rows": equal,
        "rows_as_two_rows": equal if last is None else list(range(2, last + 1)),
    }


def summarized(title: str, *lines: dict[str, Any], end: str = "") -> str:
    """Return the summary of a report with one part, in one line."""
    content = "\n".join(json.dumps(line) for line in lines)
    report = mac_summary.Report.of(f"\n== {title}\n{content}\n{end}")
    return " ".join(mac_summary.summary(report).split())
