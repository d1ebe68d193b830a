"""Files that can be opened: a pipe would be waited for, a device never ends, MLX reads UTF-8 paths.

Knows kinds and names of files. Knows nothing of what is in them.
"""

from __future__ import annotations

import stat
from pathlib import Path

from ...errors import CheckpointError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def check_regular(file: Path) -> None:
    """Raises CheckpointError for a pipe, a socket or a device, links to one included.

    What is not there, is a directory or may not be looked at is told when it is opened.
    """
    try:
        kind = stat.S_IFMT(file.stat().st_mode)
    except OSError:
        return
    if kind in _KINDS:
        raise CheckpointError(f"{file} is {_KINDS[kind]}: put a file there")


def check_path(file: Path) -> None:
    """Raises CheckpointError where MLX itself cannot open a file, by whatever name it has."""
    try:
        str(file).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{file} cannot be opened by MLX, which takes paths in UTF-8 alone: rename it"
        ) from None
