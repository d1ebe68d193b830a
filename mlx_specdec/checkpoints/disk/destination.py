"""Where a result goes: written beside its place under a temporary name, moved there when complete.

Whatever ends the work early, an error or Ctrl-C, leaves the file system as it was; what a killed
process leaves is hidden, and swept away by the next conversion to the same place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import OutputError
from . import leftovers, sizes


def check_free(
    destination: Path, *, overwrite: bool, source: Path, written: Collection[str]
) -> None:
    """Raises OutputError where `destination` may not be written: a file in the way, a directory
    and overwrite not asked for, one that holds more than a model, the working directory, the
    source itself, or where another conversion is writing it. Sweeps what killed ones left.

    written: patterns of what conversions write; nothing else is overwritten."""
    if leftovers.sweep(destination):
        raise OutputError(f"another conversion is writing {destination}: wait until it has ended")
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise OutputError(
            f"{destination} is in the way and no directory: choose another --mlx-path"
        )
    if os.path.exists(source) and source.resolve().is_relative_to(destination.resolve()):
        raise OutputError(f"{destination} holds the model to convert: choose another --mlx-path")
    if Path.cwd().is_relative_to(destination.resolve()):
        raise OutputError(f"{destination} is where you are: choose another --mlx-path")
    if not overwrite:
        raise OutputError(
            f"{destination} exists: delete it, choose another --mlx-path, or give --overwrite"
        )
    is_model = (destination / "config.json").is_file()
    for file in sorted(destination.iterdir()):
        if not is_model or file.is_dir() or not any(map(file.match, written)):
            raise OutputError(
                f"{destination} holds something other than a model, {file.name}, and is not "
                "overwritten: move it away, or choose another --mlx-path"
            )


@contextmanager
def directory(destination: Path) -> Iterator[Path]:
    """A new directory beside `destination`, which takes its place when the block ends well.

    What was there is removed only after that. Raises OutputError for anything the system refuses
    in the block or around it, and where another process has written `destination` meanwhile.
    """
    made = [parent for parent in destination.parents if not os.path.lexists(parent)]
    work, held = None, None
    try:
        before = _identity(destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        work, held = leftovers.make(destination.parent, f".{destination.name}.", ".partial")
        yield work
        if _identity(destination) != before:
            raise OutputError(f"{destination} was written by another process meanwhile: look there")
        _replace(destination, work)
    except BaseException as problem:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(problem, OSError):
            raise OutputError(_sentence(destination, problem)) from problem
        raise
    finally:
        leftovers.unlock(held)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a directory from one that has taken its place. None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        there = path.lstat()
        return there.st_dev, there.st_ino
    return None


def _replace(destination: Path, work: Path) -> None:
    """Killed at any moment this leaves the old model, the new one, or the old one under a hidden
    name, from where `leftovers.sweep` brings it back."""
    if not os.path.lexists(destination):
        work.rename(destination)  # refused where another process has just put a model there
        return
    old, held = work.with_suffix(".old"), leftovers.lock(destination)
    try:
        destination.rename(old)
        try:
            work.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        leftovers.unlock(held)


def check_room(destination: Path, nbytes: int) -> None:
    """Raises OutputError where the disk of `destination` has less than `nbytes` free."""
    free = sizes.free(destination)
    if free is not None and nbytes > free:
        raise OutputError(
            f"{destination} needs {sizes.show(nbytes)}, and its disk has {sizes.show(free)} free: "
            "make room, or choose another --mlx-path"
        )


def _sentence(destination: Path, problem: OSError) -> str:
    reason = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename:
        reason += f" ({problem.filename})"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{destination} cannot be written, the disk is full: make room and convert again"
    return f"{destination} cannot be written: {reason}: choose another --mlx-path"
