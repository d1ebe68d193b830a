"""What is wrong with a file, said where the file's name is not known."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import CheckpointError


class Malformed(Exception):
    """The rest of a sentence that begins with the file's name: "is truncated: download it again".

    Never leaves the formats: `naming` makes a CheckpointError of it.
    """


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Raises CheckpointError about `file` where the block raises Malformed."""
    try:
        yield
    except Malformed as problem:
        raise CheckpointError(f"{file} {problem}") from None
