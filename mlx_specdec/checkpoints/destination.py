"""Where a result goes: into a hidden directory next to its place, which is moved there when it is
complete. What a killed process leaves, the next one removes."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError
from . import disk


def check_free(
    destination: Path, *, overwrite: bool, source: Path, written: Collection[str]
) -> None:
    """Raises OutputError where something is in the way. Removes what killed conversions left.
    written: patterns of what conversions write; nothing else is overwritten."""
    if remove_leftovers(destination):
        raise OutputError(f"another conversion is writing {destination}: wait until it has ended")
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise OutputError(f"{destination} is no directory: choose another --mlx-path")
    # Files are compared, not names: on most disks of Macs, capital and small letters are equal.
    inside = (source.resolve(), *source.resolve().parents) if os.path.exists(source) else ()
    if any(os.path.samefile(place, destination) for place in inside):
        raise OutputError(f"{destination} holds the model to convert: choose another --mlx-path")
    if not overwrite:
        raise OutputError(f"{destination} exists: choose another --mlx-path, or give --overwrite")
    is_model = (destination / "config.json").is_file()
    for file in sorted(destination.iterdir()):
        if not is_model or file.is_dir() or not any(map(file.match, written)):
            raise OutputError(
                f"{destination} holds something other than a model, {file.name}, and is not "
                "overwritten: move it away, or choose another --mlx-path"
            )


@contextmanager
def directory(destination: Path, nbytes: int = 0) -> Iterator[Path]:
    """A new directory, which becomes `destination` when the block ends well. nbytes: what is to be
    written, for the message where the disk is full. Raises OutputError for any OSError."""
    hidden = f".{destination.name}.{os.getpid()}"
    work, old = (destination.with_name(f"{hidden}.{kind}") for kind in ("partial", "old"))
    replaces = os.path.lexists(destination)
    made = [parent for parent in destination.parents if not os.path.lexists(parent)]
    try:
        remove_leftovers(destination)
        work.mkdir(parents=True)
        yield work
        if replaces:
            destination.rename(old)
        work.rename(destination)  # refused where another process has just put a model there
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as problem:
        if old.exists() and not destination.exists():
            old.rename(destination)
        there = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
        shutil.rmtree(work, ignore_errors=True)
        with contextlib.suppress(OSError):
            for parent in made:
                parent.rmdir()
        if isinstance(problem, OSError):
            reason = f": {problem}: choose another --mlx-path"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                more = f" and {disk.show(nbytes - there)} are missing" if nbytes > there else ""
                reason = f", the disk is full{more}: make room and convert again"
            raise OutputError(f"{destination} cannot be written{reason}") from problem
        raise


def remove_leftovers(destination: Path) -> bool:
    """Remove what killed processes left next to `destination`, but move back a model that one had
    moved aside and not replaced. Returns whether a living process is writing there."""
    name = re.compile(rf"\.{re.escape(destination.name)}\.(\d{{1,9}})\.(partial|old)")
    alive = False
    for path in destination.parent.glob(".*"):
        if (match := name.fullmatch(path.name)) is None:
            continue
        try:
            os.kill(int(match[1]), 0)
        except ProcessLookupError:
            if match[2] == "old" and not os.path.lexists(destination):
                with contextlib.suppress(OSError):
                    path.rename(destination)
            else:
                shutil.rmtree(path, ignore_errors=True)
            continue
        except PermissionError:  # another user's
            pass
        alive = True
    return alive


def check_room(destination: Path, nbytes: int) -> None:
    """Raises OutputError where the disk of `destination` has less than `nbytes` free."""
    free = disk.free(destination)
    if nbytes > free:
        raise OutputError(
            f"{destination} needs {disk.show(nbytes)}, and its disk has {disk.show(free)} free: "
            "make room, or choose another --mlx-path"
        )
