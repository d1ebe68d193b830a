"""An index of documents, which finds the longest suffix of a sequence that occurs in them, and the
tokens that follow it there. It is a suffix array of the reversed documents, stored on disk."""

import contextlib
import mmap
import os
import struct
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .. import process
from .text_index import DEPTH, Match

Integers = NDArray[np.int32]

VOTERS = 16
"""Number of occurrences of a match, evenly spread, that vote for the next token."""
WIDTH = 4
"""Bytes per stored token."""
BETWEEN = b"\0\0\0\0"
"""The separator before and after every document. Token t is stored as t + 1, in four bytes in
big-endian order, so that comparing bytes compares tokens."""
FORMAT = 3
"""Version of the file format: the suffix array in native byte order, then the stored tokens."""
MOST_BYTES = 2 << 30
"""Limit on the bytes of all saved indexes. The least recently used ones are deleted first."""


class DocumentIndex:
    """A searchable index of documents.

    Args:
        places: The suffix array, from `order`.
        tokens: The tokens, from `stored`."""

    def __init__(self, places: Sequence[int], tokens: bytes | memoryview) -> None:
        self._places = places
        self._tokens = tokens

    def find(self, end: Sequence[int], count: int, least: int) -> Match:
        """Find the longest suffix of a sequence that occurs in a document; see `TextIndex.find`.
        The result has at most one continuation."""
        wanted = struct.pack(f">{len(end)}I", *[token + 1 for token in reversed(end)])
        read = self._reader(DEPTH)
        at = bisect_left(self._places, wanted, key=read)
        near = range(max(at - 1, 0), min(at + 1, len(self._places)))
        length = max((_common(wanted, read(self._places[k])) for k in near), default=0)
        if length < max(least, 1):
            return Match(0, [])
        wanted, read = wanted[: WIDTH * length], self._reader(length)
        first = bisect_left(self._places, wanted, key=read)
        after = bisect_right(self._places, wanted, first, key=read)
        return Match(length, [self._following(first, after - first, count)])

    def _following(self, first: int, size: int, count: int) -> list[int]:
        """Return at most `count` tokens that follow a match, up to the end of the document.

        Up to VOTERS of the `size` occurrences from `first` on vote for the next token. The result
        is the continuation of the first occurrence with the winning token."""
        voters = min(size, VOTERS)
        spread = (first + k * size // voters for k in range(voters))
        tails = [tail for at in spread if (tail := self._before(self._places[at], count))]
        if not tails:
            return []
        [(most, _)] = Counter(tail[-WIDTH:] for tail in tails).most_common(1)
        tail = next(tail for tail in tails if tail[-WIDTH:] == most)
        numbers = struct.unpack(f">{len(tail) // WIDTH}I", tail)
        return [number - 1 for number in reversed(numbers)]

    def _reader(self, length: int) -> Callable[[int], bytes]:
        """Return a function that returns the bytes of `length` tokens from a place on."""
        tokens, size = self._tokens, WIDTH * length
        return lambda place: bytes(tokens[WIDTH * place : WIDTH * place + size])

    def _before(self, place: int, count: int) -> bytes:
        """Return the bytes of at most `count` tokens before token `place` of its document."""
        end = WIDTH * place
        tail = bytes(self._tokens[max(end - WIDTH * count, 0) : end])
        for at in range(len(tail) - WIDTH, -1, -WIDTH):
            if tail[at : at + WIDTH] == BETWEEN:
                return tail[at + WIDTH :]
        return tail


def backwards(documents: Sequence[Integers], vocabulary: int) -> Integers:
    """Concatenate the documents, int32 arrays of token ids, in reverse order. Returns ids + 1,
    int32, with 0 around every document and in place of ids beyond the vocabulary."""
    size = sum(len(document) + 1 for document in documents)
    tokens = np.zeros(size, np.int32)
    end = size
    for document in documents:
        stored = tokens[end - len(document) : end]
        np.add(document[::-1], 1, out=stored)
        stored[(stored < 0) | (stored > vocabulary)] = 0
        end -= len(document) + 1
    return tokens


def order(tokens: Integers, depth: int = DEPTH) -> Integers:
    """Return the suffix array of `tokens`, int32, ordered by the first `depth` tokens.

    This is prefix doubling (Manber and Myers, 1990), limited to the depth. It takes about 30 bytes
    of memory per token. tokens: from `backwards`."""
    count = len(tokens)
    ranks = np.zeros(count + depth, np.int32)
    np.add(tokens, 1, out=ranks[:count])
    places = np.argsort(tokens).astype(np.int32)
    for done in range((depth - 1).bit_length()):
        del places
        keys = ranks[:count].astype(np.int64)
        keys <<= 32
        keys += ranks[1 << done :][:count]
        places = np.argsort(keys).astype(np.int32)
        keys = keys[places]
        differs = np.ones(count, bool)
        np.not_equal(keys[1:], keys[:-1], out=differs[1:])
        del keys
        ranks[places] = np.cumsum(differs, dtype=np.int32)
    return places


def stored(tokens: Integers) -> bytes:
    """Return the result of `backwards` in big-endian bytes, which the index searches."""
    return tokens.astype(">u4").tobytes()


def _common(first: bytes, second: bytes) -> int:
    """Return the number of tokens in the common prefix of two sequences of stored tokens."""
    size = min(len(first), len(second))
    differ = int.from_bytes(first[:size], "big") ^ int.from_bytes(second[:size], "big")
    return (8 * size - differ.bit_length()) // (8 * WIDTH)


@dataclass(frozen=True)
class IndexKey:
    """The identity of an index: digests of documents and tokenizer, and the vocabulary size."""

    documents: str
    tokenizer: str
    vocabulary: int

    @property
    def file(self) -> Path:
        name = f"{self.documents}-{self.tokenizer}-{self.vocabulary}-{FORMAT}.documents"
        return process.directory("documents") / name


def read(key: IndexKey) -> DocumentIndex | None:
    """Map a saved index into memory. Return None if there is none."""
    try:
        with key.file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(key.file)
    content, half = memoryview(mapped), len(mapped) // 2
    return DocumentIndex(content[:half].cast("i"), content[half:])


def build(key: IndexKey, documents: list[Integers]) -> DocumentIndex:
    """Build an index, and save it if possible. `documents` holds one int32 array of token ids per
    document; this function empties the list to free memory."""
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens)
    searched = stored(tokens)
    with contextlib.suppress(OSError), process.replacing(key.file) as stream:
        _delete_old(key.file.parent, places.nbytes + len(searched))
        stream.write(places.data)
        stream.write(searched)
    return read(key) or DocumentIndex(places.data, searched)


def _delete_old(directory: Path, needed: int) -> None:
    """Delete the oldest files in the directory until `needed` bytes fit under MOST_BYTES."""
    free = MOST_BYTES - needed
    with contextlib.suppress(OSError):
        files = [(file.stat(), file) for file in directory.iterdir()]
        for status, file in sorted(files, key=lambda entry: entry[0].st_mtime, reverse=True):
            free -= status.st_size
            if free < 0:
                file.unlink()
