"""Conversions that are killed: what they leave is no model, and the next one cleans it away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
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
    destination.sweep(target)
    assert [path.name for path in target.parent.iterdir()] == ["out"]
    after = listing(target)
    if moment == "after the moves":
        assert "README.md" not in after and after.items() <= before.items()
    else:
        assert after == before


def test_what_a_living_conversion_works_on_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with directory(target) as work:
        assert destination.sweep(target)
        assert work.is_dir()
    assert not destination.sweep(target)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_leftovers_of_this_place_are_swept(tmp_path: Path) -> None:
    dead, kept = (
        ".out.0123abcd.partial",
        [
            ".out.x.0123abcd.partial",
            ".out.0123abcd.part",
            ".out.0123abc.partial",
            ".other.0123abcd.partial",
            "out.0123abcd.partial",
            "out.x",
        ],
    )
    for name in (dead, *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / ".out.11111111.partial").symlink_to(tmp_path / "out.x")
    (tmp_path / ".out.22222222.partial").write_text("a file")
    destination.sweep(tmp_path / "out")
    rest = [".out.11111111.partial", ".out.22222222.partial"]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*kept, *rest])
    assert (tmp_path / "out.x" / "file").exists()


def test_a_place_without_a_parent_needs_no_sweeping(tmp_path: Path) -> None:
    destination.sweep(tmp_path / "none" / "out")
    assert listing(tmp_path) == {}


WITHOUT_LOCKS = """
import errno, fcntl, sys
from pathlib import Path

def refuse(*given):  # as some file systems of a network do
    raise OSError(errno.ENOLCK, "no locks")

fcntl.flock = refuse
import mlx_specdec.engine
from mlx_specdec.checkpoints import destination

with destination.directory(Path(sys.argv[1])) as work, destination.temporary():
    assert not destination.sweep(Path(sys.argv[1])) and work.is_dir()
"""


def test_a_system_without_locks_can_do_all_but_sweep(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_LOCKS, str(tmp_path / "out")], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


LAID_DOWN = """
import os, signal, sys
from pathlib import Path
from mlx_specdec.checkpoints.source import as_directory

with as_directory(Path(sys.argv[1])) as made:
    assert (made / "config.json").is_file()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_temporary_directories_of_killed_processes_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(__file__).parents[1] / "fixtures" / "meta" / "llama3"
    command = [sys.executable, "-c", LAID_DOWN, str(source)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("mlx-specdec-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("mlx-specdec-mine", "mlx-specdec-0123abcd5", "mlx"):
        (tmp_path / name).mkdir()
    with destination.temporary() as first:
        with destination.temporary() as second:
            assert first.is_dir() and second.is_dir() and first != second
            assert first.stat().st_mode & 0o777 == 0o700
        assert not left.exists() and not second.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "mlx",
        "mlx-specdec-0123abcd5",
        "mlx-specdec-mine",
    ]
