"""Where the end of a text occurred before, and what followed there: in the text itself, and in
texts that were written before.

An index is a log of tokens with chains of equal n-grams, as zlib finds repetitions: a table has the
latest place of each n-gram, and every place the one before it. It serves as a suffix tree of
bounded depth does (SuffixDecoding, arXiv 2411.04975), in 20 bytes a token."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

BETWEEN = -1
"""Stands between texts; never proposed, never matched across."""
DEPTH = 32
"""Tokens that are compared; longer matches count as this long."""
VOTERS = 16
"""The latest occurrences of an n-gram that are compared; 8 or 32 are as good."""
GRAMS = (2, 8)
"""Lengths of the n-grams that have chains. Chains of 4 and 16 as well find 0.3 % more."""
FACTOR, SPREAD, MASK = 0x2C1B3C6D, 0x9E3779B1, 0xFFFFFFFF
"""Of a hash of 32 bits."""
SMALLEST = 1024


class Match(NamedTuple):
    """The longest match. length: in tokens; 0 without one. following: the tokens after each of its
    occurrences, the latest first."""

    length: int
    following: list[list[int]]


class TextIndex:
    """An index of at most `most` tokens; the newest take the place of the oldest.

    grams: lengths of n-grams, increasing; a shorter match is not found."""

    def __init__(self, most: int, grams: Sequence[int] = GRAMS) -> None:
        self._most = most
        self._grams = grams
        self._end = DEPTH
        self._allocate(min(most, SMALLEST))

    @property
    def nbytes(self) -> int:
        return self._log.nbytes + self._latest.nbytes + self._before.nbytes

    def add(self, text: Sequence[int]) -> None:
        """Add a text, or its next tokens where nothing else was added since; n-grams across the
        beginning are left out."""
        tokens = np.array(text, np.int32)[-(self._most - DEPTH) :]
        if self._end + len(tokens) > self._capacity < self._most:
            tokens = np.concatenate((self._log[DEPTH : self._end], tokens))
            self._allocate(min(self._most, 2 * (DEPTH + len(tokens))))
        elif self._end + len(tokens) > self._capacity:
            self._log[self._end :] = BETWEEN
            self._end = DEPTH
        begin = self._end
        self._end += len(tokens)
        self._log[begin : self._end] = tokens
        longest, unsigned = self._grams[-1], tokens.astype(np.uint32)
        columns = (
            np.concatenate((np.zeros(back, np.uint32), unsigned[:-back]))
            for back in range(1, min(longest, len(tokens) - 1) + 1)
        )
        for level, slots in enumerate(self._slots(columns)):
            first = self._grams[level]
            self._link(level, slots[first:], np.arange(begin + first, self._end, dtype=np.int32))

    def append(self, token: int) -> None:
        """Add the next token of a text."""
        if self._end == self._capacity:
            self.add([token])
            return
        place = self._end
        for (_, latest, before), slot in zip(
            self._tables, self._slots(self._last(self._grams[-1])), strict=False
        ):
            before[place] = latest[slot]
            latest[slot] = place
        self._numbers[place] = token
        self._end += 1

    def find(self, end: Sequence[int], count: int, least: int) -> Match:
        """Find the longest end of a text that occurs in the log.

        end: the last tokens of the text, at most DEPTH. count: of the tokens that follow. least:
        tokens of the shortest match."""
        size, numbers, capacity = len(end), self._numbers, self._capacity
        wanted = int.from_bytes(np.array(end, np.int32).tobytes(), "little")
        levels = zip(self._tables, self._slots(reversed(end)), strict=False)
        for (gram, latest, before), slot in reversed(list(levels)):
            place, age, length = latest[slot], 0, max(gram, least)
            places: list[int] = []
            for _ in range(VOTERS):
                older = (self._end - place - 1) % capacity + 1
                # A chain ends where newer tokens have taken a place.
                if not place or older <= age:
                    break
                differs = int.from_bytes(numbers[place - size : place], "little") ^ wanted
                common = size - (differs.bit_length() + 31) // 32
                if common > length:
                    length, places = common, [place]
                elif common == length:
                    places.append(place)
                age, place = older, before[place]
            if places:
                following = (numbers[place : place + count].tolist() for place in places)
                return Match(length, [_until_between(tokens) for tokens in following])
        return Match(0, [])

    def _allocate(self, capacity: int) -> None:
        # As many slots as tokens; 0 is no place, since the first DEPTH stay empty.
        bits = max(4, (capacity - 1).bit_length())
        self._capacity = capacity
        self._shift = 32 - bits
        self._end = DEPTH
        self._log: np.ndarray = np.full(capacity, BETWEEN, np.int32)
        self._latest = np.zeros((len(self._grams), 1 << bits), np.int32)
        self._before = np.zeros((len(self._grams), capacity), np.int32)
        # Single numbers of a memoryview are read twice as fast as those of an array.
        self._numbers = self._log.data
        self._tables = [
            (gram, self._latest[level].data, self._before[level].data)
            for level, gram in enumerate(self._grams)
        ]

    def _last(self, count: int) -> Iterable[int]:
        return reversed(self._numbers[self._end - count : self._end].tolist())

    def _slots(self, columns: Iterable[Any]) -> Iterator[Any]:
        """Yield the slots of n-grams, the shortest first. columns: their last tokens, those before
        and so on; numbers, or an array for many places."""
        code, grams, shift = 0, self._grams, self._shift
        for size, column in enumerate(columns, 1):
            code = (code + column + 1) * FACTOR & MASK
            if size in grams:
                yield (code * SPREAD & MASK) >> shift
            if size == grams[-1]:
                return

    def _link(self, level: int, slots: np.ndarray, places: np.ndarray) -> None:
        """Put increasing places at the front of the chains of their slots."""
        latest, before = self._latest[level], self._before[level]
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], places[order]
        first = np.ones(len(slots), bool)
        np.not_equal(slots[1:], slots[:-1], out=first[1:])
        earlier = np.zeros(len(slots), np.int32)
        earlier[1:] = places[:-1]
        earlier[first] = latest[slots[first]]
        before[places] = earlier
        last = np.append(first[1:], True)[: len(slots)]
        latest[slots[last]] = places[last]


def _until_between(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(BETWEEN)] if BETWEEN in tokens else tokens


MOST_TOKENS = 1 << 20
"""Of all texts of a tenant: 20 MiB."""
MOST_BYTES = 128 << 20
"""Of all tenants; that of the one who came longest ago goes first."""
REMEMBERED = 64
"""Beginnings of a tenant's texts that are not added again: a conversation is sent with every
turn."""


class History:
    """The texts of the tenants of one pair: prompts and answers.

    Nobody finds another tenant's texts: each tenant has an index of its own. most: tokens for each.
    max_bytes: of all."""

    def __init__(self, most: int = MOST_TOKENS, max_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._tenants: OrderedDict[str, TextIndex] = OrderedDict()
        self._beginnings: dict[str, deque[tuple[int, bytes]]] = {}

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self._tenants.values())

    def of(self, tenant: str) -> TextIndex | None:
        """Return the index of a tenant's texts; None where there are none."""
        return self._tenants.get(tenant)

    def add(self, tenant: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Add the prompt and the tokens of a finished text, which has the prompt in it unless an
        encoder read that."""
        index = self._tenants.pop(tenant, None) or TextIndex(self._most)
        self._tenants[tenant] = index
        beginnings = self._beginnings.setdefault(tenant, deque(maxlen=REMEMBERED))
        inside = list(committed[: len(prompt)]) == list(prompt)
        for text in (committed,) if inside else (prompt, committed):
            sizes = {len(prompt), len(text), *(size for size, _ in beginnings)}
            digests = dict(_digests(text, sizes))
            known = max((n for n, of in beginnings if digests.get(n) == of), default=0)
            if known < len(text):
                # Some of what is known, so that a match may begin in it.
                index.add([*text[max(0, known - DEPTH) :], BETWEEN])
            beginnings += [(n, digests[n]) for n in (len(prompt), len(text)) if n in digests]
        while self.nbytes > self._max_bytes and len(self._tenants) > 1:
            oldest, _ = self._tenants.popitem(last=False)
            del self._beginnings[oldest]


def _digests(text: Sequence[int], sizes: Iterable[int]) -> Iterator[tuple[int, bytes]]:
    """Yield digests of beginnings of a text that have these sizes, in tokens."""
    tokens, hashed, read = np.array(text, np.int32), hashlib.blake2b(digest_size=16), 0
    for size in sorted(each for each in sizes if each <= len(tokens)):
        hashed.update(tokens[read:size].tobytes())
        read = size
        yield size, hashed.digest()
