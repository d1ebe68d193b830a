"""Destinations of conversions: what a full disk and a killed process leave."""

import errno
from pathlib import Path

import pytest

from mlx_specdec.checkpoints.destination import directory, remove_leftovers
from mlx_specdec.errors import OutputError

from ..support.checkpoints import listing


def make(path: Path, content: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(content)
    return path


def test_a_full_disk_says_how_much_is_missing(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"disk is full and 1\.5 MB are missing"),
        directory(tmp_path / "x", 2_000_000) as work,
    ):
        (work / "part").write_bytes(bytes(500_000))
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_model_that_a_killed_process_has_moved_away_is_put_back(tmp_path: Path) -> None:
    place = make(tmp_path / "model")
    before = listing(tmp_path)
    place.rename(tmp_path / ".model.999999999.old")
    assert not remove_leftovers(place) and listing(tmp_path) == before
    with directory(place) as work:
        (work / "config.json").write_text("new")
    assert listing(tmp_path) == {"model": None, "model/config.json": b"new"}
