"""The tokens of thoughts in a completion: how many there are, and when a budget closes a thought.
Imports no MLX."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self


def overlap(written: Sequence[Any], mark: Sequence[Any]) -> int:
    """Return the length of the longest end of `written` with which `mark` begins. Both are texts or
    tuples of token ids."""
    lengths = range(min(len(written), len(mark)), 0, -1)
    return next((length for length in lengths if written[-length:] == mark[:length]), 0)


@dataclass(frozen=True)
class Thoughts:
    """Whether a completion is inside a thought, as far as it was read. `after` reads more tokens.

    Attributes:
        begin, end: Ids of the marks around a thought, at least one id each.
        open: Whether the last token is inside of a thought.
        budget: Largest number of tokens of all thoughts together, or None for no limit.
        spent: Number of tokens of thoughts so far, with the written part of an end mark.
        matched: How many tokens of the next mark are written already.
    """

    begin: tuple[int, ...]
    end: tuple[int, ...]
    open: bool = False
    budget: int | None = None
    spent: int = 0
    matched: int = 0

    @property
    def tokens(self) -> int:
        """The number of thought tokens so far. Start and end marks do not count."""
        return self.spent - (self.matched if self.open else 0)

    @property
    def forced(self) -> int | None:
        """The token that must follow, since a thought has used up the budget; None if any may."""
        if not self.open or self.budget is None or self.spent < self.budget:
            return None
        return self.end[self.matched]

    def after(self, tokens: Iterable[int]) -> Self:
        """Return the state of the thoughts after further tokens of the completion."""
        thoughts = self
        for token in tokens:
            thoughts = thoughts._after(token)
        return thoughts

    def never_forced(self, count: int) -> bool:
        """Return whether none of the next `count` tokens can be forced, whatever they are."""
        if self.budget is None:
            return True
        before_thought = 0 if self.open else len(self.begin) - self.matched
        return count <= before_thought + max(0, self.budget - self.spent)

    def _after(self, token: int) -> Self:
        mark = self.end if self.open else self.begin
        matched = overlap((*mark[: self.matched], token), mark)
        spent = self.spent + self.open
        if matched < len(mark):
            return replace(self, matched=matched, spent=spent)
        if self.open:
            spent -= len(mark)
        return replace(self, open=not self.open, matched=0, spent=spent)
