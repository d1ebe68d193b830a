"""Where a result goes: written beside its place under a temporary name, moved there when complete.

Knows directories and what a disk can refuse. Knows nothing of models. Whatever ends the work early,
an error or Ctrl-C, leaves the file system as it was found.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError


def check_free(destination: Path, *, overwrite: bool, source: Path) -> None:
    """Raises OutputError where `destination` may not be written: a file in the way, a directory
    and overwrite not asked for, a directory that is no model, or the source itself."""
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise OutputError(
            f"{destination} is in the way and no directory: choose another --mlx-path"
        )
    if os.path.isdir(source) and source.resolve().is_relative_to(destination.resolve()):
        raise OutputError(f"{destination} holds the model to convert: choose another --mlx-path")
    if not overwrite:
        raise OutputError(
            f"{destination} exists: delete it, choose another --mlx-path, or give --overwrite"
        )
    if any(destination.iterdir()) and not (destination / "config.json").is_file():
        raise OutputError(
            f"{destination} holds something other than a model and is not overwritten: choose "
            "another --mlx-path"
        )


@contextmanager
def directory(destination: Path) -> Iterator[Path]:
    """A new directory beside `destination`, which takes its place when the block ends well.

    What was there is removed only after that. Raises OutputError for anything the system refuses
    in the block or around it.
    """
    made = _missing_parents(destination)
    work = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir()
        yield work
        _replace(destination, work)
    except BaseException as problem:
        shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(problem, OSError):
            raise OutputError(_sentence(destination, problem)) from problem
        raise


def _replace(destination: Path, work: Path) -> None:
    if not os.path.lexists(destination):
        work.rename(destination)
        return
    old = work.with_suffix(".old")
    destination.rename(old)
    try:
        work.rename(destination)
    except BaseException:
        old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _missing_parents(destination: Path) -> list[Path]:
    """The parents that have to be made, the innermost first."""
    return [parent for parent in destination.parents if not os.path.lexists(parent)]


def _sentence(destination: Path, problem: OSError) -> str:
    reason = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename:
        reason += f" ({problem.filename})"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{destination} cannot be written, the disk is full: make room and convert again"
    return f"{destination} cannot be written: {reason}: choose another --mlx-path"
