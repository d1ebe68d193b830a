"""Prompt lookup: find earlier occurrences of the end of a sequence, in the sequence itself, in
earlier sequences and in documents, and the tokens that followed.

An index is a log of tokens with chains of equal n-grams, like zlib's. A table holds the latest
position of each n-gram, and every position links to the previous one. An index replaces a suffix
tree of bounded depth (SuffixDecoding, arXiv 2411.04975) and takes 20 bytes per token."""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

BETWEEN = -1
"""The separator between sequences. It is never proposed, and matches never span it."""
DEPTH = 32
"""Maximum length of a match, in tokens."""
VOTERS = 16
"""How many of the latest occurrences of an n-gram are searched for the longest match with the end
of the sequence. 8 or 32 perform alike."""
GRAMS = (2, 8)
"""Lengths of the n-grams with chains. Additional chains for 4 and 16 find only 0.3 % more."""
HASH_FACTOR, HASH_SPREAD, HASH_MASK = 0x2C1B3C6D, 0x9E3779B1, 0xFFFFFFFF
"""Two odd multipliers and the mask of a 32-bit hash."""
SMALLEST = 1024
"""Initial capacity of an index, in tokens; it grows on demand."""


class Match(NamedTuple):
    """The longest match.

    Attributes:
        length: The length in tokens; 0 if there is no match.
        following: The tokens after each occurrence, the latest occurrence first."""

    length: int
    following: list[list[int]]


class TextIndex:
    """An index of the newest `most` tokens.

    Args:
        most: Capacity in tokens. New tokens overwrite the oldest ones.
        grams: Lengths of n-grams, increasing. Shorter matches are not found."""

    def __init__(self, most: int, grams: Sequence[int] = GRAMS) -> None:
        self._most = most
        self._grams = grams
        self._end = DEPTH
        self._allocate(min(most, SMALLEST))

    @property
    def nbytes(self) -> int:
        return self._log.nbytes + self._latest.nbytes + self._before.nbytes

    def add(self, text: Sequence[int] | np.ndarray) -> None:
        """Add a sequence, or further tokens of the sequence that was added last. N-grams that span
        the first added token are not indexed."""
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
        longest = self._grams[-1]
        # The first n-grams of a column are not linked, so it does not matter what precedes them.
        padded = np.concatenate((np.zeros(longest, np.uint32), tokens.astype(np.uint32)))
        backs = range(1, min(longest, len(tokens) - 1) + 1)
        columns = (padded[longest - back : -back] for back in backs)
        for level, slots in enumerate(self._slots(columns)):
            first = self._grams[level]
            self._link(level, slots[first:], np.arange(begin + first, self._end, dtype=np.int32))

    def append(self, token: int) -> None:
        """Add the next token of the sequence that was added last."""
        if self._end == self._capacity:
            self.add([token])
            return
        place, last = self._end, self._numbers[self._end - self._grams[-1] : self._end].tolist()
        slots = self._slots(reversed(last))
        for (_, latest, before), slot in zip(self._tables, slots, strict=False):
            before[place] = latest[slot]
            latest[slot] = place
        self._numbers[place] = token
        self._end += 1

    def find(self, end: Sequence[int], count: int, least: int) -> Match:
        """Find the longest suffix of a sequence that occurs in the log.

        Args:
            end: The last tokens of the sequence, at most DEPTH.
            count: How many following tokens to return.
            least: Length of the shortest match, in tokens."""
        size, numbers, capacity, wanted = len(end), self._numbers, self._capacity, -1
        levels = zip(self._tables, self._slots(reversed(end)), strict=False)
        for (gram, latest, before), slot in reversed(list(levels)):
            place, age, length = latest[slot], 0, max(gram, least)
            places: list[int] = []
            for _ in range(VOTERS):
                older = (self._end - place - 1) % capacity + 1
                # A chain ends at a position that newer tokens have overwritten.
                if not place or older <= age:
                    break
                if wanted < 0:  # most searches find no candidate and do not need it
                    wanted = int.from_bytes(np.array(end, np.int32).tobytes(), "little")
                differs = int.from_bytes(numbers[place - size : place], "little") ^ wanted
                common = size - (differs.bit_length() + 31) // 32
                if common > length:
                    length, places = common, [place]
                elif common == length:
                    places.append(place)
                age, place = older, before[place]
            if places:
                ends = [[*numbers[place : place + count], BETWEEN] for place in places]
                return Match(length, [tokens[: tokens.index(BETWEEN)] for tokens in ends])
        return Match(0, [])

    def _allocate(self, capacity: int) -> None:
        # At least as many slots as tokens. Position 0 means none, since the first DEPTH are empty.
        bits = max(4, (capacity - 1).bit_length())
        self._capacity = capacity
        self._shift = 32 - bits
        self._end = DEPTH
        self._log: np.ndarray = np.full(capacity, BETWEEN, np.int32)
        self._latest = np.zeros((len(self._grams), 1 << bits), np.int32)
        self._before = np.zeros((len(self._grams), capacity), np.int32)
        # Reading single numbers from a memoryview is twice as fast as from an array.
        self._numbers = self._log.data
        levels = zip(self._grams, self._latest, self._before, strict=True)
        self._tables = [(gram, latest.data, before.data) for gram, latest, before in levels]

    def _slots(self, columns: Iterable[Any]) -> Iterator[Any]:
        """Yield the hash-table slots of n-grams, the shortest one first. columns: The last token,
        the token before it and so on, as integers or as arrays with one entry per position."""
        code, grams, shift = 0, self._grams, self._shift
        for size, column in enumerate(columns, 1):
            code = (code + column + 1) * HASH_FACTOR & HASH_MASK
            if size in grams:
                yield (code * HASH_SPREAD & HASH_MASK) >> shift
            if size == grams[-1]:
                return

    def _link(self, level: int, slots: np.ndarray, places: np.ndarray) -> None:
        """Insert positions, in increasing order, at the front of the chains of their slots."""
        latest, before = self._latest[level], self._before[level]
        order = np.argsort(slots, kind="stable")
        slots, places = slots[order], places[order]
        before[places] = latest[slots]
        repeated = slots[1:] == slots[:-1]
        before[places[1:][repeated]] = places[:-1][repeated]
        # Of several positions for one slot, the last one is stored.
        latest[slots] = places


MOST_TOKENS = 1 << 20
"""Limit on the tokens of one tenant, which take 20 MiB."""
MOST_BYTES = 128 << 20
"""Limit on the bytes of all tenants. The index of the least recent tenant is deleted first."""
REMEMBERED_PREFIXES = 64
"""How many prefixes of a tenant's sequences are remembered, so that they are not added again. A
chat client sends the whole conversation with every turn."""


class History:
    """The earlier sequences of the tenants of one pair, in a separate index per tenant.

    Args:
        most: Capacity of each index in tokens.
        max_bytes: Limit on the bytes of all indexes."""

    def __init__(self, most: int = MOST_TOKENS, max_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._max_bytes = max_bytes
        # For each tenant its index, and the lengths and hashes of the remembered prefixes.
        self._tenants: OrderedDict[str, tuple[TextIndex, deque[tuple[int, int]]]] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(index.nbytes for index, _ in self._tenants.values())

    def of(self, tenant: str) -> TextIndex | None:
        """Return the index of a tenant, or None if it has no sequences."""
        return self._tenants[tenant][0] if tenant in self._tenants else None

    def add(self, tenant: str, prompt: Sequence[int], committed: Sequence[int]) -> None:
        """Add a finished sequence. `committed` begins with the prompt, unless the model is an
        encoder-decoder."""
        if tenant not in self._tenants:
            self._tenants[tenant] = TextIndex(self._most), deque(maxlen=REMEMBERED_PREFIXES)
        self._tenants.move_to_end(tenant)
        index, beginnings = self._tenants[tenant]
        inside = list(committed[: len(prompt)]) == list(prompt)
        for text in (committed,) if inside else (prompt, committed):
            raw = np.array(text, np.int32).tobytes()
            stored = max((n for n, hashed in beginnings if hash(raw[: 4 * n]) == hashed), default=0)
            if stored < len(text):
                # Repeat DEPTH stored tokens, so that a match may begin in them.
                index.add([*text[max(0, stored - DEPTH) :], BETWEEN])
            beginnings += [(n, hash(raw[: 4 * n])) for n in (len(prompt), len(text))]
        while self.nbytes > self._max_bytes and len(self._tenants) > 1:
            self._tenants.popitem(last=False)
