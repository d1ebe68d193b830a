"""A panic of the tokenizers library -> one line: its regular expressions are a stranger's."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError, first_line

_STANDARD_ERROR = 2
_lock = threading.Lock()


@contextlib.contextmanager
def no_panic(directory: Path) -> Iterator[None]:
    """Raises CheckpointError, of a tokenizer's directory, where the library panics.

    Rust writes a backtrace to standard error before anyone can catch the panic, so that nothing
    gets there meanwhile.
    """
    with _lock, contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # there may be no standard error
            kept = os.dup(_STANDARD_ERROR)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, _STANDARD_ERROR)
            with open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), _STANDARD_ERROR)
        try:
            yield
        except BaseException as problem:  # pyo3's PanicException is no Exception
            if type(problem).__name__ != "PanicException":
                raise
            raise CheckpointError(
                f"the tokenizer of {directory} fails on this text ({first_line(problem):.100}): "
                "download its tokenizer.json again"
            ) from None
