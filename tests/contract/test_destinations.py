"""Where a conversion writes: the place has a whole model, or what it had before."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_specdec import OutputError, convert

from ..support.checkpoints import listing, write_t5
from .converted import config_of
from .support import command


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_t5(tmp_path / "t5")


def make(path: Path) -> Path:
    """Write what looks like a model."""
    path.mkdir(parents=True)
    (path / "config.json").write_text("old")
    return path


def refuse(source: Path, place: Path, **options: Any) -> str:
    """Return the one line with which a conversion fails, after which nothing has changed."""
    root = source.parent
    before = listing(root)
    with pytest.raises(OutputError) as caught:
        convert(str(source), place, **options)
    assert listing(root) == before and "\n" not in str(caught.value)
    return str(caught.value)


def test_what_exists_is_overwritten_only_on_request_and_only_a_model(
    source: Path, tmp_path: Path
) -> None:
    model, documents = make(tmp_path / "model"), tmp_path / "documents"
    documents.mkdir()
    (documents / "letter").write_text("dear")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(model)
    assert "--overwrite" in refuse(source, model)
    assert "other than a model" in refuse(source, documents, overwrite=True)
    for name in ("file", "link"):
        assert "is no directory" in refuse(source, tmp_path / name, overwrite=True)
    flags = ("--model", source, "--mlx-path", model, "--overwrite", "--dtype", "bfloat16")
    assert command("convert", *flags).code == 0
    assert config_of(model)["torch_dtype"] == "bfloat16"
    kept = {"documents", "file", "link", "model", "t5"}
    assert {path.name for path in tmp_path.iterdir()} == kept


def test_the_model_to_convert_is_never_overwritten(source: Path) -> None:
    assert "holds the model to convert" in refuse(source, source, overwrite=True)
    assert "holds the model to convert" in refuse(source, source.parent, overwrite=True)


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(3), ValueError("x")])
@pytest.mark.parametrize("taken", [False, True])
def test_whatever_ends_a_conversion_leaves_the_place_as_it_was(
    source: Path, problem: BaseException, taken: bool
) -> None:
    place = source.parent / "a" / "b"
    if taken:
        make(place)
    before = listing(source.parent)

    def stop(step: str, done: int, total: int) -> None:
        if done > total / 2:
            raise problem

    with pytest.raises(type(problem)):
        convert(str(source), place, overwrite=True, progress=stop)
    assert listing(source.parent) == before


def test_a_model_is_replaced_as_a_whole_or_stays(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, real = make(source.parent / "model"), Path.rename

    def rename(self: Path, target: Path) -> Path:
        if target == place and (self / "provenance.json").exists():
            raise OSError(errno.EIO, "Input/output error")
        return real(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", rename)
        refuse(source, place, overwrite=True)
    convert(str(source), place, overwrite=True)
    assert config_of(place)["model_type"] == "t5"
    assert {path.name for path in source.parent.iterdir()} == {"t5", "model"}


def test_who_comes_while_another_conversion_writes_learns_it_at_once(source: Path) -> None:
    place, texts = source.parent / "model", list[str]()

    def second(step: str, done: int, total: int) -> None:
        if total / 2 < done < total and not texts:
            with pytest.raises(OutputError) as caught:
                convert(str(source), place, overwrite=True)
            texts.append(str(caught.value))

    convert(str(source), place, progress=second)
    assert "another conversion is writing" in texts[0]
    assert config_of(place)["model_type"] == "t5"


def test_too_little_room_is_reported_before_anything_is_written(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    text = refuse(source, source.parent / "not" / "there" / "yet")
    assert "needs 10.1 MB, and its disk has 5.0 MB free" in text


KILLED = """
import os, signal, sys
from pathlib import Path
from mlx_specdec import convert

source, root = sys.argv[1], Path(sys.argv[2])

def die(*rest):
    os.kill(os.getpid(), signal.SIGKILL)

for moment, share in enumerate([0.0, 0.5, 2.0]):
    child = os.fork()
    if not child:
        convert(
            source,
            root / str(moment) / "out",
            progress=lambda step, done, total: (
                die() if done >= share * total or step.startswith("comparing") else None
            ),
        )
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_killed_conversion_leaves_no_model_and_the_next_one_cleans(
    source: Path, tmp_path: Path
) -> None:
    """It is killed at its begin, in the middle, and before all is in place."""
    subprocess.run([sys.executable, "-c", KILLED, str(source), str(tmp_path)], check=True)
    for moment in range(3):
        place = tmp_path / str(moment)
        left = [path.name for path in place.iterdir()] if place.exists() else []
        assert bool(left) is (moment > 0) and "out" not in left
        convert(str(source), place / "out")
        assert [path.name for path in place.iterdir()] == ["out"]
