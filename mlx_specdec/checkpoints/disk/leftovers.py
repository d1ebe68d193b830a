"""What killed conversions leave: told from what living ones use, and cleaned away.

Every directory of work is locked while its process lives, and the system lets go of the lock with
the process, however that ends.
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

    None where the system has no locks; such directories are never taken for leftovers. wait: for
    who has it; raises BlockingIOError otherwise.
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
    """Remove what killed conversions to `destination` left beside it. Whether a living one is
    there.

    A model that one of them had moved aside to replace it, and did not replace, is moved back.
    What cannot be removed stays.
    """
    name = rf"\.{re.escape(destination.name)}\.[0-9a-f]{{8}}\.(partial|old)"
    return _sweep(destination.parent, name, destination)


@contextmanager
def temporary() -> Iterator[Path]:
    """A new directory where the system has such, removed when the block ends; first what killed
    processes left there is. Raises OSError where it cannot be made."""
    root = Path(tempfile.gettempdir())
    _sweep(root, rf"{TEMPORARY}[0-9a-f]{{8}}", None)
    made, held = make(root, TEMPORARY, "", 0o700)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
        unlock(held)


def _sweep(root: Path, name: str, destination: Path | None) -> bool:
    """Whether there is a living one."""
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
