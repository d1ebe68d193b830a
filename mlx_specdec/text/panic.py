"""A panic of the tokenizers library -> one line: its regular expressions are a stranger's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError, first_line


@contextlib.contextmanager
def no_panic(directory: Path) -> Iterator[None]:
    """Raises CheckpointError, of a tokenizer's directory, where the library panics.

    Rust has told standard error of it by then; to keep that from there would take the whole
    process's standard error away from everybody else.
    """
    try:
        yield
    except BaseException as problem:  # pyo3's PanicException is no Exception
        if type(problem).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"the tokenizer of {directory} fails on this text ({first_line(problem):.100}): "
            "download its tokenizer.json again"
        ) from None
