"""The scripts that train the models in weights/ and measure links between machines."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from .support.shipped import ROOT
from .support.thread_ranks import adding_up, on_every, ranks

sys.path.insert(0, str(ROOT / "scripts"))

import make_head_prompts
import measure_all_sum
import simulate_fleet
from demo_training.texts import PREFIX, library_files, split

WORDS = ["tea", "milk", "bread", "salt", "fish", "snow", "rain", "wind", "night", "morning"]
SOURCE = '''
class Shelf:
    """Holds things."""

    def count(self):
        """How many.

        Empty ones as well.
        """
        return len(self)

def add(a, b):
    return a + b

def short(): return 1
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder of Python files."""
    directory = tmp_path / "library"
    directory.mkdir()
    for word in WORDS:
        text = "\n".join(f"def {word}_{n}(a, b):\n    return a + {n} * b\n" for n in range(60))
        (directory / f"{word}.py").write_text(text)
    return directory


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    """English and French."""
    file = tmp_path / "pairs.tsv"
    lines = [f"I like {a} and {b}.\tJ'aime {b} et {a}." for a in WORDS for b in WORDS]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").rglob("*.py")), ids=lambda f: f.name)
def test_what_scripts_import_of_the_package_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("mlx_specdec"):
            names = ", ".join(each.name for each in node.names)
            exec(f"from {node.module} import {names}", {})


# ------------------------------------------------------------------ what is learned from


def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    output = tmp_path / "prompts.jsonl"
    monkeypatch.setattr(sys, "argv", ["make_head_prompts.py", *flags, "--output", str(output)])
    make_head_prompts.main()
    return [json.loads(line)["prompt"] for line in output.read_text().splitlines()]


def test_a_function_begins_with_its_head_and_docstring_alone() -> None:
    assert list(make_head_prompts.function_beginnings(SOURCE)) == [
        "def add(a, b):\n",
        'def count(self):\n    """How many.\n\n    Empty ones as well.\n    """\n',
    ]


def test_python_prompts_come_from_one_side_of_the_split(
    tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned, held_out = split(library_files(library))
    for flags, files in (((), learned), (("--held-out",), held_out)):
        found = prompts(tmp_path, monkeypatch, "python", "--library", str(library), *flags)
        allowed = "\n".join(file.read_text() for file in files)
        assert found and len(set(found)) == len(found)
        assert all(prompt.rstrip("\n") in allowed for prompt in found)


def test_translation_prompts_are_sentences_behind_the_models_prefix(
    tmp_path: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ("translation", "--data", str(sentences), "--count", "20")
    found = prompts(tmp_path, monkeypatch, *flags)
    assert len(found) == 20
    assert all(prompt.startswith(PREFIX) for prompt in found)
    assert "J'aime" not in "".join(found)
    assert prompts(tmp_path, monkeypatch, *flags) == found


# ------------------------------------------------------------------ sums over machines


def test_machines_add_up_as_often_as_is_said_and_keep_their_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = ranks(3)
    with adding_up(monkeypatch):
        sums = on_every(group, lambda r: measure_all_sum.sums(mx.ones((2, 4)), 5, r).tolist())
    assert [rank.sums for rank in group] == [5, 5, 5]
    assert all(mx.allclose(mx.array(states), mx.ones((2, 4))) for states in sums)


def test_figures_are_of_one_sum() -> None:
    taken = [float(place) for place in range(100, 0, -1)]
    assert measure_all_sum.figures(taken) == {"median_us": 50.5, "p90_us": 91.0}
    assert measure_all_sum.figures([640.0], 64) == {"median_us": 10.0, "p90_us": 10.0}
    one = measure_all_sum.measure(mx.distributed.init(), 8, 3, mx.bfloat16, count=4, turns=2)
    assert (one["rows"], one["bytes"]) == (3, 48)
    assert all(one[kind]["median_us"] > 0 for kind in ("alone", "in_a_pass"))


# ------------------------------------------------------------------ what a Mac can tell


def test_the_script_for_macs_runs_to_its_end_and_writes_one_file(tmp_path: Path) -> None:
    file = tmp_path / "report.txt"
    done = subprocess.run(
        [ROOT / "scripts" / "mac.sh", file], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0 and f"wrote {file}" in done.stderr
    text = file.read_text()
    assert "(ended with code" not in text and "error:" not in text
    parts = text.split("\n== ")[1:]
    assert [part.splitlines()[0] for part in parts][:5] == [
        "machine",
        "memory limits",
        "translation: plain and draft",
        "Python: plain, draft and DSpark",
        "Python with whole weights",
    ]
    objects = [
        json.loads(line) for line in text.splitlines() if line.startswith("{") and ": " in line
    ]
    assert objects[0]["usable"] > 0 and "mlx" in objects[0]["versions"]
    methods = [one["name"] for one in objects[2]["methods"]]
    assert any("dspark" in name for name in methods) and "plain" in methods
    cells = objects[-1]["cells"]
    assert {cell["kind"] for cell in cells} == {"product", "attention"}
    assert objects[-1]["cells_left_out"] == 0
    assert all(cell["ms"] > 0 for cell in cells)
    assert all(cell.get("last_row_apart", 0) < 1e-4 for cell in cells)
    assert [cell["of_one_row"] for cell in cells if cell["rows"] == 1] == [1.0] * 5


def test_a_fleet_reuses_more_with_affinity_and_is_the_same_every_time() -> None:
    def reused(choose: str) -> float:
        lines = {simulate_fleet.simulate(6, 3, choose, 1.5, minutes=10) for _ in range(2)}
        [line] = lines
        return float(line.split("|")[5])

    assert 0 < 1.5 * reused("fewest") < min(reused("key"), reused("conversation")) < 0.99
