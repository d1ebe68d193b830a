"""What killed conversions leave: told from what living ones use, and cleaned away.

Every directory of work is locked while its process lives, and the system lets go of the lock with
the process, however that ends. Knows names and locks. Knows nothing of what lies there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = "mlx-specdec-"
_TEMPORARY = re.compile(rf"{TEMPORARY}[0-9a-f]{{8}}")


def make(destination: Path) -> tuple[Path, int | None]:
    """A new hidden directory beside `destination`, and its lock; see `lock`."""
    while True:
        work = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.partial")
        work.mkdir()
        held = lock(work)
        # Between the two lines above another process may have taken it for a leftover.
        if held is None or os.path.isdir(work):
            return work, held
        os.close(held)


def lock(directory: Path) -> int | None:
    """Lock a directory until the result, a file descriptor, is closed or the process ends.

    None where the file system has no locks; such directories are never taken for leftovers.
    """
    held = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
    except OSError:
        os.close(held)
        return None
    return held


def unlock(held: int | None) -> None:
    """Let go of a lock."""
    if held is not None:
        os.close(held)


def sweep(destination: Path) -> None:
    """Remove what killed conversions to `destination` left beside it.

    A model that one of them had moved aside to replace it, and did not replace, is moved back.
    What cannot be removed stays.
    """
    name = re.compile(rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    with contextlib.suppress(OSError):
        for path in sorted(destination.parent.iterdir()):
            if name.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    _clean(path, destination)


@contextmanager
def temporary() -> Iterator[Path]:
    """A new directory where the system has such, removed when the block ends; first what killed
    processes left there is. Raises OSError where it cannot be made."""
    root = Path(tempfile.gettempdir())
    with contextlib.suppress(OSError):
        for path in sorted(root.glob(f"{TEMPORARY}*")):
            if _TEMPORARY.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                with contextlib.suppress(OSError):
                    _clean(path, path)
    made, held = _make_temporary(root)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        unlock(held)


def _make_temporary(root: Path) -> tuple[Path, int | None]:
    while True:
        made = root / f"{TEMPORARY}{secrets.token_hex(4)}"
        made.mkdir(mode=0o700)
        held = lock(made)
        if held is None or made.is_dir():  # else swept before it was locked
            return made, held
        os.close(held)


def _clean(path: Path, destination: Path) -> None:
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its process lives
        if path.suffix == ".old" and not os.path.lexists(destination):
            path.rename(destination)
        else:
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(held)
