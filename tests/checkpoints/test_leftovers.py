"""Conversions that are killed: what they leave is no model, and the next one cleans it away."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_specdec.checkpoints import destination
from mlx_specdec.checkpoints.destination import directory
from mlx_specdec.conversion.convert import convert

from ..support.checkpoints import listing, write_t5

KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_specdec.checkpoints import destination
from mlx_specdec.checkpoints import files
from mlx_specdec.conversion.convert import convert

source, target, moment = sys.argv[1:]

def die(*rest, **more):
    os.kill(os.getpid(), signal.SIGKILL)

real = Path.rename

def rename(self, other):
    if moment == "between the moves" and self.suffix == ".partial":
        die()
    real(self, other)
    if moment == "after the moves" and self.suffix == ".partial":
        die()

Path.rename = rename
share = float(moment) if moment[0].isdigit() else 2.0
convert(
    source,
    Path(target),
    overwrite=True,
    compare_logits=die if moment == "logits" else None,
    progress=lambda done, total: die() if done >= share * total else None,
)
"""
MOMENTS = ["0", "0.01", "0.25", "0.49", "0.5", "0.51", "0.9", "logits"]


def killed(source: Path, target: Path, moment: str) -> None:
    command = [sys.executable, "-c", KILLED, str(source), str(target), moment]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans(
    tmp_path: Path, moment: str
) -> None:
    source, target = write_t5(tmp_path / "t5"), tmp_path / "deep" / "out"
    killed(source, target, moment)
    assert not target.exists()
    left = list(target.parent.iterdir()) if target.parent.exists() else []
    assert all(path.name.startswith(".out.") and path.suffix == ".partial" for path in left)
    assert bool(left) is (moment != "0")
    convert(str(source), target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("moment", ["0.5", "logits", "between the moves", "after the moves"])
def test_a_killed_replacement_leaves_a_whole_model_or_brings_it_back(
    tmp_path: Path, moment: str
) -> None:
    source, target = write_t5(tmp_path / "t5"), tmp_path / "deep" / "out"
    convert(str(source), target)
    (target / "README.md").write_text("the old one")
    before = listing(target)
    killed(source, target, moment)
    assert target.exists() is (moment != "between the moves")
    destination.remove_leftovers(target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    after = listing(target)
    if moment == "after the moves":
        assert "README.md" not in after and after.items() <= before.items()
    else:
        assert after == before


def test_what_a_living_conversion_works_on_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with directory(target) as work:
        assert destination.remove_leftovers(target)
        assert work.is_dir()
    assert not destination.remove_leftovers(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_leftovers_of_this_place_are_removed(tmp_path: Path) -> None:
    dead = ".out.999999999.partial"
    others = [".out.x.999999999.partial", ".out.1.part", ".other.999999999.partial", "out.x"]
    for name in (dead, *others):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".out.999999998.partial").symlink_to(tmp_path / "out.x")
    destination.remove_leftovers(tmp_path / "out")
    destination.remove_leftovers(tmp_path / "none" / "out")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*others, ".out.999999998.partial"])
    assert (tmp_path / "out.x" / "file").exists()
