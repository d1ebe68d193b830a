"""An index of documents: where the end of a text occurs in them, and what follows it there. It is a
suffix array of the reversed documents, saved in the user's cache directory."""

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

Integers = NDArray[np.int32]

DEPTH = 32
"""Tokens that are compared; longer matches count as this long."""
VOTERS = 16
"""Occurrences of a match, spread evenly, that decide how it goes on."""
WIDTH = 4
BETWEEN = b"\0\0\0\0"
"""Stands around every document. Token t is stored as t + 1, in four bytes, the highest first, so
that bytes compare as tokens do."""
FORMAT = 3
"""Of files: all places, in the byte order of the machine, then what is searched."""
MOST_BYTES = 2 << 30
"""Size of all saved indexes together; those that were used longest ago are deleted."""


@dataclass(frozen=True)
class Match:
    """The longest suffix of a text that occurs in the documents. length: in tokens, at most DEPTH.
    first, end: its occurrences, numbered in the order of places."""

    length: int
    first: int
    end: int


class DocumentIndex:
    """Documents that can be searched. places: from `order`. tokens: from `stored`, from byte
    `offset` of the buffer to its end."""

    def __init__(self, places: Sequence[int], tokens: bytes | mmap.mmap, offset: int = 0) -> None:
        self._places = places
        self._tokens = tokens
        self._offset = offset

    def find(self, text: Sequence[int]) -> Match:
        """Return the longest suffix of `text` that occurs in a document; tens of microseconds."""
        end = text[-DEPTH:]
        wanted = struct.pack(f">{len(end)}I", *[token + 1 for token in reversed(end)])
        read = self._reader(DEPTH)
        at = bisect_left(self._places, wanted, key=read)
        near = range(max(at - 1, 0), min(at + 1, len(self._places)))
        length = max((_common(wanted, read(self._places[k])) for k in near), default=0)
        if not length:
            return Match(0, 0, 0)
        wanted, read = wanted[: WIDTH * length], self._reader(length)
        first = bisect_left(self._places, wanted, key=read)
        return Match(length, first, bisect_right(self._places, wanted, first, key=read))

    def following(self, match: Match, count: int) -> list[int]:
        """Return at most `count` tokens that follow a match, up to the document's end: the next one
        of most of up to VOTERS occurrences, and what follows it in the first of these."""
        size = match.end - match.first
        voters = min(size, VOTERS)
        spread = (match.first + k * size // voters for k in range(voters))
        tails = [tail for at in spread if (tail := self._before(self._places[at], count))]
        if not tails:
            return []
        (most, _), *_ = Counter(tail[-WIDTH:] for tail in tails).most_common(1)
        tail = next(tail for tail in tails if tail[-WIDTH:] == most)
        numbers = struct.unpack(f">{len(tail) // WIDTH}I", tail)
        return [number - 1 for number in reversed(numbers)]

    def _reader(self, length: int) -> Callable[[int], bytes]:
        """Return a function that returns the bytes of `length` tokens at a place."""
        tokens, offset, size = self._tokens, self._offset, WIDTH * length

        def read(place: int) -> bytes:
            begin = offset + WIDTH * place
            return tokens[begin : begin + size]

        return read

    def _before(self, place: int, count: int) -> bytes:
        """Return the bytes of the tokens before a place, from the document's end on."""
        end = self._offset + WIDTH * place
        tail = self._tokens[max(end - WIDTH * count, self._offset) : end]
        for at in range(len(tail) - WIDTH, -1, -WIDTH):
            if tail[at : at + WIDTH] == BETWEEN:
                return tail[at + WIDTH :]
        return tail


def backwards(documents: Sequence[Integers], vocabulary: int) -> Integers:
    """Return the documents, int32 each, the last one first and each from its end, as int32: tokens
    + 1, and 0 before, between and after them and for ids outside of the vocabulary."""
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
    """Return all places, ordered by the `depth` numbers from there on. tokens: from `backwards`.
    Takes about 30 bytes a number. Prefix doubling (Manber and Myers, 1990) up to the depth."""
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
    """Return the result of `backwards` as the bytes that are searched."""
    return tokens.astype(">u4").tobytes()


def _common(one: bytes, other: bytes) -> int:
    """Return the number of tokens in a common prefix of two texts."""
    size = min(len(one), len(other))
    differ = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (8 * size - differ.bit_length()) // (8 * WIDTH)


@dataclass(frozen=True)
class IndexKey:
    """What an index depends on: two digests, and the number of token ids of the model."""

    documents: str
    tokenizer: str
    vocabulary: int

    @property
    def file(self) -> Path:
        name = f"{self.documents}-{self.tokenizer}-{self.vocabulary}-{FORMAT}.documents"
        return process.directory("documents") / name


def read(key: IndexKey) -> DocumentIndex | None:
    """Map a saved index into memory; None where there is none."""
    try:
        with key.file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):
        return None
    with contextlib.suppress(OSError):
        os.utime(key.file)
    half = len(mapped) // 2
    return DocumentIndex(memoryview(mapped)[:half].cast("i"), mapped, half)


def build(key: IndexKey, documents: list[Integers]) -> DocumentIndex:
    """Build an index and save it if possible. documents: token ids, int32 each; the list is
    emptied, to release its memory."""
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens)
    searched = stored(tokens)
    with contextlib.suppress(OSError), process.replacing(key.file) as stream:
        _delete_old(key.file.parent, places.nbytes + len(searched))
        stream.write(places.data)
        stream.write(searched)
    saved = read(key)
    return DocumentIndex(places.data, searched) if saved is None else saved


def _delete_old(directory: Path, needed: int) -> None:
    """Make room for `needed` bytes, also by what interrupted processes left."""
    room = MOST_BYTES - needed
    with contextlib.suppress(OSError):
        files = [(file.stat(), file) for file in directory.iterdir()]
        for status, file in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
            room -= status.st_size
            if room < 0:
                file.unlink()
