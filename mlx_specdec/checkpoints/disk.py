"""Safe reading of untrusted files, as JSON or memory maps."""

import contextlib
import json
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError, SourceError

_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1024
"""The beginning of a Git LFS pointer, and a size that no pointer reaches."""

BLOCK_BYTES = 1 << 22
"""Bytes that are read at a time."""


def check_regular(file: Path) -> None:
    """Raise CheckpointError for a pipe, a socket, a device or a Git LFS pointer."""
    if os.path.exists(file) and not os.path.isfile(file):
        raise CheckpointError(f"{file} is no regular file: put one there")
    with contextlib.suppress(OSError):
        if file.stat().st_size < _POINTER_BYTES and file.read_bytes().startswith(_POINTER):
            raise CheckpointError(f"{file} is a pointer of Git LFS: run `git lfs pull` there")


def check_directory(directory: Path) -> None:
    """Raise SourceError for a directory that this user may not read, or in Meta's own layout."""
    if not os.access(directory, os.R_OK | os.X_OK):
        raise SourceError(f"{directory} may not be read: give yourself the right to")
    if any(directory.glob("consolidated.*.pth")) and not (directory / "config.json").exists():
        raise SourceError(
            f"{directory} has Meta's own layout, which is not read any more: take the model in "
            "Hugging Face's format, which every Llama on the Hub has"
        )


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise CheckpointError if `check_regular` does, or if the block raises OSError."""
    check_regular(file)
    try:
        yield
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem


def blocks(stream: BinaryIO, nbytes: int) -> Iterator[bytes]:
    """Yield the next `nbytes` bytes of a file, or all that there are, in blocks."""
    while nbytes > 0 and (block := stream.read(min(nbytes, BLOCK_BYTES))):
        yield block
        nbytes -= len(block)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object. Raises CheckpointError if the file cannot be read or is no object."""
    try:
        with reading(file):
            value = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{file} is not JSON: download it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    return value


def open_map(file: Path) -> mmap.mmap:
    """Map a file for reading. Raises CheckpointError, also for an empty file."""
    try:
        with reading(file), file.open("rb") as stream:
            return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{file} is empty: download it again") from None
