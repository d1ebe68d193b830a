"""Where a result goes: written beside its place under a temporary name, moved there when complete.

Whatever ends the work early leaves the file system as it was; what a killed process leaves is swept
away by the next one, which tells it by a lock that ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError
from . import disk as sizes


def check_free(
    destination: Path, *, overwrite: bool, source: Path, written: Collection[str]
) -> None:
    """Raises OutputError where `destination` may not be written: for what is in the way, and for
    the source itself. Sweeps what killed conversions left.

    written: patterns of what conversions write; nothing else is overwritten.
    """
    if sweep(destination):
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
def directory(destination: Path, nbytes: int = 0) -> Iterator[Path]:
    """A new directory beside `destination`, which takes its place when the block ends well.

    nbytes: what is to be written, for the message where the disk is full. Raises OutputError for
    anything the system refuses in the block or around it, and where another process has written
    `destination` meanwhile.
    """
    made = [parent for parent in destination.parents if not os.path.lexists(parent)]
    work, held = None, None
    try:
        before = _identity(destination)
        destination.parent.mkdir(parents=True, exist_ok=True)
        work, held = make(destination.parent, f".{destination.name}.", ".partial")
        yield work
        if _identity(destination) != before:
            raise OutputError(f"{destination} was written by another process meanwhile: look there")
        _replace(destination, work)
    except BaseException as problem:
        missing = 0
        if work is not None:
            there = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
            missing = nbytes - there
            shutil.rmtree(work, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):
                parent.rmdir()
        if isinstance(problem, OSError):
            raise OutputError(_sentence(destination, problem, missing)) from problem
        raise
    finally:
        unlock(held)


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a directory from one that has taken its place. None where there is none."""
    with contextlib.suppress(FileNotFoundError):
        there = path.lstat()
        return there.st_dev, there.st_ino
    return None


def _replace(destination: Path, work: Path) -> None:
    """Killed at any moment this leaves the old model, the new one, or the old one under a hidden
    name, from where `sweep` brings it back."""
    if not os.path.lexists(destination):
        work.rename(destination)  # refused where another process has just put a model there
        return
    old, held = work.with_suffix(".old"), lock(destination)
    try:
        destination.rename(old)
        try:
            work.rename(destination)
        except BaseException:
            old.rename(destination)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        unlock(held)


def check_room(destination: Path, nbytes: int) -> None:
    """Raises OutputError where the disk of `destination` has less than `nbytes` free."""
    free = sizes.free(destination)
    if free is not None and nbytes > free:
        raise OutputError(
            f"{destination} needs {sizes.show(nbytes)}, and its disk has {sizes.show(free)} free: "
            "make room, or choose another --mlx-path"
        )


def _sentence(destination: Path, problem: OSError, missing: int) -> str:
    reason = problem.strerror or str(problem) or type(problem).__name__
    if problem.filename:
        reason += f" ({problem.filename})"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        more = f" and {sizes.show(missing)} are missing" if missing > 0 else ""
        return (
            f"{destination} cannot be written, the disk is full{more}: make room and convert again"
        )
    if problem.errno == errno.EFBIG:
        return (
            f"{destination} cannot be written, its disk or a limit of this user takes no file of "
            "this size: give a smaller --max-shard-size, for example 1GB"
        )
    return f"{destination} cannot be written: {reason}: choose another --mlx-path"


TEMPORARY = "mlx-specdec-"


def make(root: Path, before: str, after: str, mode: int = 0o777) -> tuple[Path, int | None]:
    """A new directory in `root`, called by eight hexadecimal digits between `before` and `after`,
    and its lock; see `lock`."""
    while True:
        work = root / f"{before}{secrets.token_hex(4)}{after}"
        work.mkdir(mode)
        held = lock(work)
        # Between the two lines above another process may have taken it for a leftover.
        if held is None or work.is_dir():
            return work, held
        os.close(held)


def lock(directory: Path, *, wait: bool = True) -> int | None:
    """Lock a directory until the result, a file descriptor, is closed or the process ends.

    None where the system has no locks. wait: for who has it; raises BlockingIOError otherwise.
    """
    held = None
    try:
        held = os.open(directory, os.O_RDONLY)
        fcntl.flock(held, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        return held
    except OSError as problem:
        unlock(held)
        if isinstance(problem, BlockingIOError):
            raise
        return None


def unlock(held: int | None) -> None:
    """Let go of a lock."""
    if held is not None:
        os.close(held)


def sweep(destination: Path) -> bool:
    """Remove what killed conversions to `destination` left, but move back a model that one had
    moved aside and not replaced. Whether a living one is there."""
    name = rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.(partial|old)"
    return _sweep(destination.parent, name, destination)


@contextmanager
def temporary() -> Iterator[Path]:
    """A new directory for temporary files; first what killed processes left there is removed."""
    root = Path(tempfile.gettempdir())
    _sweep(root, rf"{TEMPORARY}[0-9a-f]{{8}}", None)
    made, held = make(root, TEMPORARY, "", 0o700)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        unlock(held)


def _sweep(root: Path, name: str, destination: Path | None) -> bool:
    alive = False
    with contextlib.suppress(OSError):
        for path in sorted(root.iterdir()):
            if re.fullmatch(name, path.name) and path.is_dir() and not path.is_symlink():
                try:
                    _clean(path, destination)
                except BlockingIOError:
                    alive = True
    return alive


def _clean(path: Path, destination: Path | None) -> None:
    held = lock(path, wait=False)
    if held is None:
        return
    try:
        if path.suffix == ".old" and destination is not None and not os.path.lexists(destination):
            path.rename(destination)
        else:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)
