"""Destinations of conversions, which a killed conversion leaves without a model."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_specdec.checkpoints.destination import check_free, check_room, directory, remove_leftovers
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import OutputError

from ..support.checkpoints import listing, refusal, write_t5


def make(path: Path, content: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(content)
    return path


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), ValueError("x")])
@pytest.mark.parametrize("taken", [False, True])
def test_whatever_ends_the_block_leaves_the_place_as_it_was(
    tmp_path: Path, problem: BaseException, taken: bool
) -> None:
    place = tmp_path / "a" / "b"
    if taken:
        make(place)
    before = listing(tmp_path)
    with pytest.raises(type(problem)), directory(place) as work:
        (work / "deep").mkdir()
        (work / "deep" / "x").write_text("x")
        raise problem
    assert listing(tmp_path) == before


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"disk is full and 1\.5 MB are missing"),
        directory(tmp_path / "x", 2_000_000) as work,
    ):
        (work / "part").write_bytes(bytes(500_000))
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_model_is_replaced_as_a_whole_or_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make(tmp_path / "model")
    before, real = listing(tmp_path), Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        with pytest.raises(OutputError), directory(place) as work:
            (work / "config.json").write_text("new")
    assert listing(tmp_path) == before
    # As a process leaves it that was killed between the moves.
    place.rename(tmp_path / ".model.999999999.old")
    assert not remove_leftovers(place) and listing(tmp_path) == before
    with directory(place) as work:
        (work / "config.json").write_text("new")
    assert listing(tmp_path) == {"model": None, "model/config.json": b"new"}


def refuse(place: Path, source: Path, *, overwrite: bool = False) -> str:
    options = {"overwrite": overwrite, "source": source, "written": ["config.json", "*.txt"]}
    return refusal(OutputError, check_free, place, **options)


def test_what_exists_is_overwritten_only_on_request_and_only_a_model(tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    model = make(tmp_path / "model")
    documents = tmp_path / "documents"
    documents.mkdir()
    (documents / "letter").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(model)
    assert "exists" in refuse(model, source)
    check_free(model, overwrite=True, source=source, written=["config.json"])
    check_free(tmp_path / "new", overwrite=False, source=source, written=[])
    assert "other than a model" in refuse(documents, source, overwrite=True)
    for name in ("file", "link"):
        assert "is no directory" in refuse(tmp_path / name, source, overwrite=True)


@pytest.mark.parametrize("inside", ["x", "x/inner"])
def test_the_model_to_convert_is_never_overwritten_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: str
) -> None:
    """On most disks of Macs, models/x and Models/x are one directory."""
    source, place = make(tmp_path / "models" / inside), make(tmp_path / "alias")
    one = {tmp_path / "models" / "x", place}
    monkeypatch.setattr(os.path, "samefile", lambda *names: {*map(Path, names)} <= one)
    assert "holds the model to convert" in refuse(place, source, overwrite=True)
    elsewhere = make(tmp_path / "models" / "y")
    check_free(place, overwrite=True, source=elsewhere, written=["config.json"])


HELD = """
import sys
from pathlib import Path
from mlx_specdec.checkpoints.destination import directory

with directory(Path(sys.argv[1])) as work:
    print("begun", flush=True)
    (work / "config.json").write_text(input())
"""


def test_who_comes_while_another_process_converts_learns_it_at_once(tmp_path: Path) -> None:
    source, place = write_t5(tmp_path / "t5"), tmp_path / "model"
    with subprocess.Popen(
        [sys.executable, "-c", HELD, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        with pytest.raises(OutputError, match="another conversion is writing"):
            convert(str(source), place, overwrite=True)
        process.communicate("the first")
    assert listing(place) == {"config.json": b"the first"}


def test_too_little_room_is_reported_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_000_000_000))
    place = tmp_path / "not" / "there" / "yet"
    check_room(place, 3_000_000_000)
    with pytest.raises(OutputError, match=r"needs 3\.5 GB, and its disk has 3\.0 GB free"):
        check_room(place, 3_500_000_000)


# Killed conversions


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_specdec.conversion.convert import convert

source, target, moment = sys.argv[1:]

def die(*rest):
    os.kill(os.getpid(), signal.SIGKILL)

share = float(moment) if moment != "logits" else 2.0
convert(
    source,
    Path(target),
    compare_logits=die,
    progress=lambda done, total: die() if done >= share * total else None,
)
"""
MOMENTS = ["0", "0.5", "logits"]


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
