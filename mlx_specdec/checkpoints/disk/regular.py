"""Files that can be opened: a pipe would be waited for, MLX reads UTF-8 paths alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ...errors import CheckpointError, SourceError

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""How a pointer of Git LFS begins, and more bytes than one has."""


def check_regular(file: Path) -> None:
    """Raises CheckpointError for a pipe, a socket or a device, links to one included, and for a
    pointer of Git LFS.

    What is not there, is a directory or may not be looked at is told when it is opened.
    """
    try:
        there = file.stat()
        kind = stat.S_IFMT(there.st_mode)
        small = kind == stat.S_IFREG and there.st_size < _POINTER_BYTES
        pointer = small and file.read_bytes().startswith(_POINTER)
    except OSError:
        return
    if kind in _KINDS:
        raise CheckpointError(f"{file} is {_KINDS[kind]}: put a file there")
    if pointer:
        raise CheckpointError(
            f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` where it was "
            "cloned"
        )


def check_directory(directory: Path) -> None:
    """Raises SourceError for a directory whose files this user may not see."""
    try:
        os.scandir(directory).close()
        os.stat(os.path.join(directory, os.curdir))
    except PermissionError:
        raise SourceError(
            f"{directory} may not be read: give yourself the right, as in `chmod u+rx`"
        ) from None
    except OSError:
        return


def check_path(file: Path) -> None:
    """Raises CheckpointError where MLX itself cannot open a file, by whatever name it has."""
    try:
        str(file).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(
            f"{file} cannot be opened by MLX, which takes paths in UTF-8 alone: rename it"
        ) from None
