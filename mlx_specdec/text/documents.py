"""Documents to search: files of text, whatever their size, -> token ids.

Knows files and tokenizers. Knows nothing of how documents are searched.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DocumentError
from .tokenizer import Tokenizer

LARGEST = 1 << 30
"""Bytes of all documents together."""
PIECE = 1 << 16
"""Bytes that are tokenized at a time, up to the end of a line where one comes soon."""
HASHED = 1 << 22


def digest(files: Sequence[Path]) -> str:
    """Digest of what the files hold, in this order.

    Raises DocumentError for a file that cannot be read, is no file, or holds nothing, and where all
    together are larger than LARGEST.
    """
    _check(files)
    whole = hashlib.blake2b(digest_size=16)
    for file in files:
        one = hashlib.blake2b()
        for block in _blocks(file, HASHED):
            one.update(block)
        whole.update(one.digest())
    return whole.hexdigest()


def tokens(
    files: Sequence[Path],
    tokenizer: Tokenizer,
    report: Callable[[int, int], None] | None = None,
) -> list[NDArray[np.int32]]:
    """The ids of each file, without the special tokens that belong around a prompt.

    report: called with (done, total) bytes. Raises DocumentError as `digest` does, and for a file
    that is no UTF-8 text or only white space.
    """
    total, done = _check(files), 0
    special = tokenizer.special_ids
    documents = []
    if report is not None:
        report(0, total)
    for file in files:
        parts: list[NDArray[np.int32]] = []
        blank = True
        for text, size in _pieces(file):
            blank = blank and not text.strip()
            parts.append(np.array(_inner(tokenizer.encode(text), special), np.int32))
            done += size
            if report is not None:
                report(min(done, total), total)
        if blank:
            raise DocumentError(f"{file} is empty: there is nothing to look up in it")
        documents.append(np.concatenate(parts))
    if report is not None:
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
        if not status.st_size:
            raise DocumentError(f"{file} is empty: there is nothing to look up in it")
        total += status.st_size
    if total > LARGEST:
        raise DocumentError(
            f"{files[-1] if len(files) == 1 else 'the documents to look up'} "
            f"{'has' if len(files) == 1 else 'have'} {total / 2**20:.0f} MiB, and at most "
            f"{LARGEST / 2**20:.0f} can be searched: leave some out"
        )
    return total


def _blocks(file: Path, size: int) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while block := stream.read(size):
                yield block
    except OSError as problem:
        raise DocumentError(f"cannot read {file}: {problem.strerror}") from None


def _pieces(file: Path) -> Iterator[tuple[str, int]]:
    """Texts of whole lines and how many bytes were read for each; line ends become \\n."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    for block in _blocks(file, PIECE):
        text = rest + _decode(file, decoder, block)
        cut = text.rfind("\n") + 1 or len(text)
        rest = text[cut:]
        yield text[:cut].replace("\r\n", "\n"), len(block)
    rest += _decode(file, decoder, b"", final=True)
    if rest:
        yield rest, 0


def _decode(
    file: Path, decoder: codecs.IncrementalDecoder, block: bytes, final: bool = False
) -> str:
    try:
        text = decoder.decode(block, final)
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise DocumentError(f"{file} is not UTF-8 text: only text can be looked up")
    return text


def _inner(ids: list[int], special: frozenset[int]) -> list[int]:
    """Without special tokens at either end."""
    begin, end = 0, len(ids)
    while begin < end and ids[begin] in special:
        begin += 1
    while end > begin and ids[end - 1] in special:
        end -= 1
    return ids[begin:end]
