"""Files in the platform's cache directory. A cache is a help and never a duty."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PLACE = "MLX_SPECDEC_CACHE"
"""Environment variable: a directory to use in place of the platform's."""


def directory(kind: str) -> Path:
    """Where the files of a kind lie; it need not exist."""
    if place := os.environ.get(PLACE):
        return Path(place) / kind
    from platformdirs import user_cache_path

    return user_cache_path("mlx-specdec") / kind


def write_text(file: Path, text: str) -> None:
    """Write a text in the place of a file, whole or not at all; what is no file, such as a pipe,
    is written to as it comes. Raises OSError."""
    file = file.resolve()
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    with replacing(file, make_parents=False) as stream:
        stream.write(text.encode())


@contextlib.contextmanager
def replacing(file: Path, *, make_parents: bool = True) -> Iterator[BinaryIO]:
    """What is written in the block takes the file's place at its end, whole or not at all.

    Raises OSError.
    """
    if make_parents:
        file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.replace(name, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
