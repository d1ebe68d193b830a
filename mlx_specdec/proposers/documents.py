"""Where the end of a text occurs in documents, and what comes after it there.

The documents lie backwards, one after the other, so that the longest end of a text that occurs
anywhere is found by one binary search among their places, ordered by what precedes them (a suffix
array of the reversed documents).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import struct
import sys
import time
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .. import process as user_cache

Integers = NDArray[np.int32]

DEPTH = 32
"""Tokens that are compared: longer matches count as this long."""
VOTERS = 16
"""Of a match's places so many, spread evenly, decide how it goes on."""
WIDTH = 4
BETWEEN = b"\0\0\0\0"
"""Stands around every document; token t is stored as t + 1, four bytes, the highest first, so that
bytes compare as tokens do."""


@dataclass(frozen=True)
class Match:
    """The longest end of a text that occurs in the documents, and its occurrences in their order.

    length: in tokens, at most DEPTH; 0 if even the last token occurs nowhere.
    """

    length: int
    first: int
    end: int


class DocumentIndex:
    """Documents that can be searched.

    places: see `order`. tokens: see `stored`, from byte `offset` of the buffer to its end.
    """

    def __init__(self, places: Sequence[int], tokens: bytes | mmap.mmap, offset: int = 0) -> None:
        self._places = places
        self._tokens = tokens
        self._offset = offset

    def __len__(self) -> int:
        return len(self._places)

    def find(self, text: Sequence[int]) -> Match:
        """The longest end of `text` that occurs in a document. Tens of microseconds."""
        wanted = _packed(text[-DEPTH:])
        read = self._reader(DEPTH)
        at = bisect_left(self._places, wanted, key=read)
        near = range(max(at - 1, 0), min(at + 1, len(self._places)))
        length = max((_common(wanted, read(self._places[k])) for k in near), default=0)
        if not length:
            return Match(0, 0, 0)
        wanted, read = wanted[: WIDTH * length], self._reader(length)
        low, high = _around(at, len(self._places), lambda k: read(self._places[k]) == wanted)
        first = bisect_left(self._places, wanted, low, at, key=read)
        end = bisect_right(self._places, wanted, at, high, key=read)
        return Match(length, first, end)

    def following(self, match: Match, count: int) -> list[int]:
        """At most `count` tokens that follow a match, up to the document's end.

        The next token is what most of up to VOTERS occurrences go on with, the others follow it
        in the first of these occurrences.
        """
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
        """What gives the bytes of `length` tokens at a place."""
        tokens, offset, size = self._tokens, self._offset, WIDTH * length

        def read(place: int) -> bytes:
            begin = offset + WIDTH * place
            return tokens[begin : begin + size]

        return read

    def _before(self, place: int, count: int) -> bytes:
        """The bytes of the tokens before a place, from the document's end on."""
        end = self._offset + WIDTH * place
        tail = self._tokens[max(end - WIDTH * count, self._offset) : end]
        for at in range(len(tail) - WIDTH, -1, -WIDTH):
            if tail[at : at + WIDTH] == BETWEEN:
                return tail[at + WIDTH :]
        return tail


def backwards(documents: Sequence[Integers], vocabulary: int) -> Integers:
    """The documents, the last one first and each from its end, as int32: tokens + 1, and 0 before,
    between and after them.

    documents: int32 each. vocabulary: ids from here on, and negative ones, are never matched and
    never proposed.
    """
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
    """All places, ordered by the `depth` numbers from there on; the end comes before any number.

    tokens: as `backwards` returns them. About 30 bytes a number are in use, `tokens` included.
    Prefix doubling (Manber and Myers, 1990), which stops at the depth.
    """
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
    """What `backwards` returns, or a part of it, as it is searched."""
    return tokens.astype(">u4").tobytes()


def _around(at: int, size: int, holds: Callable[[int], bool]) -> tuple[int, int]:
    """Bounds of the stretch around `at` where something holds, at most twice as far as it goes."""
    low, step = at, 1
    while low > 0 and holds(low - 1):
        low, step = max(low - step, 0), 2 * step
    high, step = at, 1
    while high < size and holds(high):
        high, step = min(high + step, size), 2 * step
    return low, high


def _packed(text: Sequence[int]) -> bytes:
    return struct.pack(f">{len(text)}I", *[token + 1 for token in reversed(text)])


def _common(one: bytes, other: bytes) -> int:
    """How many tokens two texts have in common at their beginning, no boundary among them."""
    size = min(len(one), len(other))
    differ = int.from_bytes(one[:size], "big") ^ int.from_bytes(other[:size], "big")
    return (8 * size - differ.bit_length()) // (8 * WIDTH)


FORMAT = 2
HEADER = 512
BLOCK = 1 << 22
KEPT = 2 << 30
"""Bytes of all indexes together; beyond, those that were used longest ago are deleted."""
SETTLED = 5
"""Seconds after its last change from which on a file's time tells its contents."""
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True)
class IndexKey:
    """What an index depends on: digests of the documents and of the tokenizer, and how many token
    ids the model has."""

    documents: str
    tokenizer: str
    vocabulary: int


def digest(files: Sequence[Path], compute: Callable[[Sequence[Path]], str]) -> str:
    """`compute(files)`, remembered by the files' paths, sizes and times of change: hashing a large
    corpus takes longer than opening its index."""
    try:
        states = [(os.path.abspath(file), os.stat(file)) for file in files]
    except OSError:
        return compute(files)  # it says what is wrong
    told = json.dumps([(path, state.st_size, state.st_mtime_ns) for path, state in states])
    note = (
        user_cache.directory("documents")
        / f"{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}.digest"
    )
    with contextlib.suppress(OSError, ValueError):
        if _DIGEST.fullmatch(kept := note.read_text(encoding="ascii")):
            return kept
    computed = compute(files)
    # What changed just now may change again without a change of its time.
    if all(state.st_mtime < time.time() - SETTLED for _, state in states):
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(computed, encoding="ascii")
    return computed


def read(key: IndexKey) -> DocumentIndex | None:
    """The index as a file mapped into memory; None where there is none that is whole."""
    file = _file(key)
    try:
        with file.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        header = json.loads(mapped[:HEADER])
    except (OSError, ValueError):
        return None
    count, rest = divmod(len(mapped) - HEADER, 2 * WIDTH)
    if rest or header != _header(key, count):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    end = HEADER + WIDTH * count
    return DocumentIndex(memoryview(mapped)[HEADER:end].cast("i"), mapped, end)


def build(key: IndexKey, documents: list[Integers]) -> DocumentIndex:
    """Build an index and keep it on disk if that works.

    documents: token ids, int32 each; the list is emptied, to have the memory.
    """
    tokens = backwards(documents, key.vocabulary)
    documents.clear()
    places = order(tokens)
    with contextlib.suppress(OSError):
        _write(_file(key), _header(key, len(places)), places, tokens)
    kept = read(key)
    return DocumentIndex(places.data, stored(tokens)) if kept is None else kept


def _write(file: Path, header: dict[str, object], places: Integers, tokens: Integers) -> None:
    with user_cache.replacing(file) as stream:
        _delete_old(file.parent, places.nbytes + tokens.nbytes)
        stream.write(json.dumps(header).encode().ljust(HEADER))
        for begin in range(0, len(places), BLOCK):
            stream.write(places[begin : begin + BLOCK].tobytes())
        for begin in range(0, len(tokens), BLOCK):
            stream.write(stored(tokens[begin : begin + BLOCK]))
        stream.flush()
        os.fsync(stream.fileno())


def _file(key: IndexKey) -> Path:
    name = f"{key.documents}-{key.tokenizer}-{key.vocabulary}-{FORMAT}.documents"
    return user_cache.directory("documents") / name


def _header(key: IndexKey, count: int) -> dict[str, object]:
    layout = {"format": FORMAT, "depth": DEPTH, "byteorder": sys.byteorder}
    return {**layout, **asdict(key), "count": count}


def _delete_old(place: Path, needed: int) -> None:
    """Make room for `needed` bytes among KEPT; what killed processes left goes with the rest."""
    room = KEPT - needed
    with contextlib.suppress(OSError):
        files = [(file.stat(), file) for file in place.iterdir()]
        for status, file in sorted(files, key=lambda each: each[0].st_mtime, reverse=True):
            room -= status.st_size
            if room < 0:
                file.unlink()
