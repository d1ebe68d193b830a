"""Which tokens may follow in a text that a grammar binds.

A sequence has a constraint of its own: the grammar's state behind the committed tokens, which says
what each position of a block allows. Only `take` moves it for good. Imports no MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import is_panic

Answer = TypeVar("Answer")
Words = NDArray[np.uint32]
"""(rows, words): a bit for each token id, the lowest one of a word first."""
ALL = np.uint32(0xFFFFFFFF)


class Constraint:
    """What a grammar allows in one sequence.

    fresh: llguidance's matcher at the beginning, which is copied. ends: ids that end the text; they
    may come where the grammar is complete, and nowhere else. size: of the vocabulary. banned: ids
    that never come, whatever the grammar says.
    """

    def __init__(
        self, fresh: Any, ends: Collection[int], size: int, banned: Iterable[int] = ()
    ) -> None:
        self._fresh = fresh
        self._matcher = fresh.deep_copy()
        self._ends = frozenset(ends)
        self._size = size
        self._possible = np.full((size + 31) // 32, ALL)
        for id in (*banned, *range(size, 32 * len(self._possible))):
            self._possible[id // 32] &= ~(np.uint32(1) << np.uint32(id % 32))
        self._taken: list[int] = []
        self._over = False
        self._dead: int | None = None
        self._complete = False
        self._failed = False

    @property
    def stuck(self) -> bool:
        """Whether one of the rows of `masks` allows nothing that the model can write, or that row
        or what was taken needs more than llguidance's limits."""
        return self._dead is not None

    @property
    def complete(self) -> bool:
        """Whether `take` refused a token because nothing can follow a text that fits the grammar:
        every token that ends a text is banned."""
        return self._complete

    def take(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the first one that the grammar does not allow, and return their
        number. Tokens behind an end token are not checked."""
        if self._over:
            return len(tokens)
        return self._answer(lambda: self._take(tokens), 0)

    def _take(self, tokens: Sequence[int]) -> int:
        text = self._before_end(tokens)
        masked = text if self._dead is None else text[: self._dead]
        count: int = self._matcher.try_consume_tokens(masked)
        self._taken += text[:count]
        if count == len(tokens):
            return count
        self._over = True
        if self._matcher.is_error():
            self._dead = 0
        elif self._matcher.is_accepting() and count == len(text) != self._dead:
            return len(tokens)
        else:
            self._complete = count == self._dead and self._matcher.is_accepting()
        return count

    def verifiable(self, drafted: Sequence[int]) -> int:
        """How many drafted tokens, from the first on, are worth a look: up to and with the first
        one that cannot come, or that ends the text. Rules have to see that one: what is drawn in
        its place depends on what it was drawn from."""
        if self._over:
            return len(drafted)
        text = takewhile(lambda token: 0 <= token < self._size, self._before_end(drafted))
        possible = self._answer(lambda: self._matcher.validate_tokens(list(text)), 0)
        self._answer(lambda: self._take_back(0), None)
        return min(possible + 1, len(drafted))

    def masks(self, drafted: Sequence[int]) -> Words:
        """What may come at each position: row j behind j of the drafted tokens, (n + 1, words).

        Rows that no rule gets to, behind a token that cannot come, allow everything. So does one
        where nothing can come: `stuck` is true then, and `take` refuses what is chosen there.
        """
        rows = np.full((len(drafted) + 1, (self._size + 31) // 32), ALL)
        self._dead = None
        if not self._over:
            self._answer(lambda: self._mask(rows, drafted), None)
        return rows

    def _mask(self, rows: Words, drafted: Sequence[int]) -> None:
        taken = 0
        for place, row in enumerate(rows):
            allowed = self._allowed()
            if allowed is None:
                self._dead = place
                break
            row[:] = allowed
            if place == len(drafted) or not self._goes_on(row, drafted[place]):
                break
            taken += 1
        self._take_back(taken)

    def forced(self) -> list[int]:
        """Tokens that the grammar leaves no choice about, in the tokens of canonical text."""
        if self._over:
            return []
        tokens: list[int] = self._answer(lambda: self._matcher.compute_ff_tokens(), [])
        self._answer(lambda: self._take_back(0), None)
        return list(takewhile(lambda token: token < self._size, tokens))

    def _answer(self, ask: Callable[[], Answer], otherwise: Answer) -> Answer:
        """Return what `ask` returns, or `otherwise` if llguidance panics: this text alone is stuck
        from then on."""
        if not self._failed:
            try:
                return ask()
            except BaseException as problem:
                if not (isinstance(problem, Exception) or is_panic(problem)):
                    raise
                self._failed = True
        self._dead = 0
        return otherwise

    def _before_end(self, tokens: Sequence[int]) -> list[int]:
        return list(takewhile(lambda token: token not in self._ends, tokens))

    def _allowed(self) -> Words | None:
        """What may come here; None where nothing can."""
        # It has more bits than there are tokens.
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype="<u4")
        if self._matcher.is_error():
            return None
        words = words[: len(self._possible)].astype(np.uint32)
        complete = self._matcher.is_accepting()
        for end in self._ends:
            bit = np.uint32(1 << end % 32)
            words[end // 32] = words[end // 32] & ~bit | (bit if complete else np.uint32(0))
        words &= self._possible
        return words if words.any() else None

    def _goes_on(self, row: Words, token: int) -> bool:
        """Take a drafted token for a while, if the text goes on with it."""
        if token in self._ends or not has(row, token):
            return False
        return self._matcher.try_consume_tokens([token]) == 1

    def _take_back(self, count: int) -> None:
        """Forget `count` tokens. An error, which a draft can lead into, stays with a matcher for
        good: then another one reads the committed tokens."""
        if self._matcher.is_error() or (count and not self._matcher.rollback(count)):
            self._matcher = self._fresh.deep_copy()
            self._matcher.try_consume_tokens(self._taken)


def has(row: Words, token: int) -> bool:
    """Return whether a row allows a token; ids outside the vocabulary are not allowed."""
    if not 0 <= token < 32 * len(row):
        return False
    return bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1))
