"""The directory of a result. Files are written to a hidden directory next to the destination, which
is renamed when it is complete. A later process removes what a killed process has left."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError
from ..system import show_size


def check_free(
    destination: Path, *, overwrite: bool, source: Path, written: Collection[str]
) -> None:
    """Raise OutputError if the destination cannot be written, and remove what killed conversions
    have left. written: Patterns of the files that may be overwritten."""
    if remove_leftovers(destination):
        raise OutputError(f"another conversion is writing {destination}: wait until it has ended")
    if not os.path.lexists(destination):
        return
    if not destination.is_dir() or destination.is_symlink():
        raise OutputError(f"{destination} is no directory: choose another --mlx-path")
    # Files are compared, not names, because most disks of Macs ignore the case of names.
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
    """Yield a new directory, which is renamed to `destination` if the block ends without an error.
    nbytes: The bytes to write, for the message about a full disk. Raises OutputError."""
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
        work.rename(destination)  # fails if another process has just put a model there
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
            reason = f": {problem}: choose another place"
            if problem.errno in (errno.ENOSPC, errno.EDQUOT):
                more = f" and {show_size(nbytes - there)} are missing" if nbytes > there else ""
                reason = f", the disk is full{more}: make room and try again"
            raise OutputError(f"{destination} cannot be written{reason}") from problem
        raise


def remove_leftovers(destination: Path) -> bool:
    """Remove what killed processes have left next to `destination`, and move back a model that they
    moved aside and did not replace. Return whether a running process writes there."""
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
        except PermissionError:  # a process of another user
            pass
        alive = True
    return alive
