"""Files that can be opened, as JSON or as a memory map: nothing is read that nobody asks for."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ...errors import CheckpointError, SourceError

DEEPEST = 50
"""JSON objects and lists in each other; those of real files have seven."""
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
    pointer of Git LFS; what cannot be looked at is told when it is opened."""
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


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raises CheckpointError as `check_regular`, and where the block raises OSError."""
    check_regular(file)
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file. Raises CheckpointError where it cannot be read or is no JSON object."""
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    if _is_deeper(value, DEEPEST):
        raise CheckpointError(f"{file} is refused: it nests more than {DEEPEST} objects and lists")
    return value


def _is_deeper(value: Any, levels: int) -> bool:
    # Whoever walks through such a value by recursion would overrun Python's stack.
    level = [value]
    for _ in range(levels):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for part in inner for each in part if isinstance(each, dict | list)]
    return bool(level)


def open_map(file: Path) -> mmap.mmap:
    """A read-only map of a whole file. Raises CheckpointError, also for an empty file."""
    try:
        with reading(file), file.open("rb") as stream:
            opened = _Map(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{file} is empty: download it again") from None
    _maps.add(opened)
    return opened


class _Map(mmap.mmap):
    """One that can be referred to weakly."""


_maps: WeakSet[_Map] = WeakSet()


def drop_pages() -> None:
    """Release the pages that were read through maps, which would count as memory of this process
    while the map exists. Reading them again takes them from the system's cache, or the file."""
    for each in [*_maps] if hasattr(mmap, "MADV_DONTNEED") else ():
        if not each.closed:
            each.madvise(mmap.MADV_DONTNEED)
