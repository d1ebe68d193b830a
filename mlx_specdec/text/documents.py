"""Documents to search: files of text, whatever their size, -> token ids."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DocumentError
from .tokenizer import Tokenizer

LARGEST = 1 << 30
"""Bytes of all documents together."""
PIECE = 1 << 16
"""Letters that are tokenized at a time, up to the end of a line where one comes soon."""


def digest(files: Sequence[Path]) -> str:
    """Digest of what the files hold, in this order.

    Raises DocumentError for a file that cannot be read or is no file, and where all together are
    larger than LARGEST.
    """
    _check(files)
    whole = hashlib.blake2b(digest_size=16)
    for file in files:
        with _readable(file), file.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "blake2b").digest())
    return whole.hexdigest()


def tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[NDArray[np.int32]]:
    """The ids of each file, without the special tokens that belong around a prompt.

    report: called with (done, total) bytes. Raises DocumentError as `digest` does, and for a file
    that is no UTF-8 text or only white space.
    """
    total, done = _check(files), 0
    special = list(tokenizer.special_ids)
    documents = []
    report(0, total)
    for file in files:
        parts, blank = [], True
        for text in _pieces(file):
            blank = blank and not text.strip()
            ids = np.array(tokenizer.encode(text), np.int32)
            (inner,) = np.nonzero(~np.isin(ids, special))
            parts.append(ids[inner[0] : inner[-1] + 1] if inner.size else ids[:0])
            done += len(text.encode())
            report(min(done, total), total)
        if blank:
            raise DocumentError(f"{file} is empty: there is nothing to look up in it")
        documents.append(np.concatenate(parts))
    report(total, total)
    return documents


def _check(files: Sequence[Path]) -> int:
    """Size of all files in bytes."""
    total = 0
    for file in files:
        try:
            status = os.stat(file)
        except OSError as problem:
            raise DocumentError(f"cannot read {file}: {problem.strerror}") from None
        if stat.S_ISDIR(status.st_mode):
            raise DocumentError(f"{file} is a directory: name the files in it that are to be read")
        if not stat.S_ISREG(status.st_mode):
            raise DocumentError(f"{file} is no file of text: name a regular file")
        total += status.st_size
    if total > LARGEST:
        raise DocumentError(
            f"the documents to look up have {total / 2**20:.0f} MiB, and at most "
            f"{LARGEST / 2**20:.0f} can be searched: leave some out"
        )
    return total


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise DocumentError(f"cannot read {file}: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise DocumentError(f"{file} is not UTF-8 text: only text can be looked up") from None


def _pieces(file: Path) -> Iterator[str]:
    """Texts of whole lines; line ends become \\n."""
    with _readable(file), file.open(encoding="utf-8") as stream:
        while text := stream.read(PIECE):
            text += stream.readline(PIECE)
            if "\0" in text:
                raise DocumentError(f"{file} is not UTF-8 text: only text can be looked up")
            yield text
