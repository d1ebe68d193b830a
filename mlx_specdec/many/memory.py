"""What sequences take of memory beside the models, and how much of it there is for them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..assemble import Pair
from ..checkpoints.disk import sizes
from ..decoding.prompt import chunk
from ..drafting.drafter import Drafter
from ..errors import PromptError

SPARE = 1 / 4
"""Of the target's weights: bytes that may lie unused in the caches of a group. Another group costs
another pass over all weights in every round."""
RESERVE = 1 / 16
"""Of the usable memory: what passes take besides, and the least that a default budget is."""


@dataclass(frozen=True)
class Extent:
    """How long a sequence is, in tokens: of its prompt, of its caches now, and of its caches if it
    goes on until max_tokens."""

    prompt: int
    now: int
    end: int


def even(sizes: Sequence[int], spare: float) -> bool:
    """Whether a rectangle with a row for each size, as wide as the largest, is worth its memory: it
    adds at most `spare`, or as much as the rows that are filled up have themselves."""
    longest, whole = max(sizes), sum(sizes)
    return longest * len(sizes) - whole <= max(spare, whole - longest)


def default_budget(pair: Pair, cached: int) -> int:
    """What the machine has for texts: its usable memory without weights, a reserve for passes, and
    the `cached` bytes that a prompt cache may take, or half of the rest where that is less."""
    usable = sizes.usable_memory()
    reserve = int(RESERVE * usable)
    rest = max(0, usable - pair.target.nbytes - pair.draft_bytes - reserve)
    return max(reserve, rest - min(cached, rest // 2))


class MemoryBudget:
    """Prices of sequences in bytes. chosen: who drafts. nbytes: for all of them; None takes
    `default_budget`. cached: bytes that a prompt cache may take. step: tokens of a prompt in one
    pass; None takes `chunk`."""

    def __init__(
        self,
        pair: Pair,
        chosen: Sequence[Drafter],
        nbytes: int | None = None,
        cached: int = 0,
        step: int | None = None,
    ) -> None:
        self.nbytes = default_budget(pair, cached) if nbytes is None else nbytes
        names = {each.name for each in chosen}
        self._target, self._draft, self._speculator = pair.target, None, None
        if "draft" in names:
            self._draft = pair.draft
        if pair.speculator is not None and pair.speculator.kind in names:
            self._speculator = pair.speculator
        self._spare = SPARE * pair.target.nbytes
        self._most_a_round = 1 + max((each.most for each in chosen), default=0)
        self._step = step
        self.of_caches([Extent(1, 1, 1)])  # arrays of all kinds are met here, in this thread

    def even(self, rows: Sequence[Extent]) -> bool:
        """Whether caches of these lengths, as they are now, belong into one group."""
        return even([self._row(each.prompt, each.now) for each in rows], self._spare)

    def of_caches(self, rows: Sequence[Extent]) -> int:
        """The most that the caches of a group come to take. A row is as wide as the longest of the
        group, which grows by at most a whole round for each token that the row has still to go."""
        prompt, now, end = (max(each) for each in zip(*map(astuple, rows), strict=True))
        return sum(
            self._row(prompt, min(end, now + self._most_a_round * (row.end - row.now)))
            for row in rows
        )

    def of_reading(self, rows: Sequence[Extent]) -> int:
        """About the working memory of reading a group's prompts, a chunk at a time."""
        longest = max(each.prompt for each in rows)
        step = self._step or chunk(len(rows))
        return len(rows) * self._target.reading_nbytes(longest, min(step, longest))

    def room(self, prompt: int, most: int) -> int:
        """How many tokens, of at most `most`, may be generated behind a prompt of so many.

        Raises PromptError where not even one may.
        """
        seen = len(self._target.prefix([0] * prompt))

        def alone(generated: int) -> int:
            rows = [Extent(prompt, seen, seen + generated)]
            return self.of_caches(rows) + self.of_reading(rows)

        if alone(most) <= self.nbytes:
            return most
        fits = bisect_right(range(most), self.nbytes, key=alone) - 1
        if fits < 1:
            raise PromptError(
                f"the prompt has {prompt:,} tokens, which take {sizes.show(alone(1))} of memory, "
                f"and {sizes.show(self.nbytes)} are there for all texts: shorten it, or raise "
                "memory-budget"
            )
        return fits

    def check(self, prompt: int, most: int) -> None:
        """Raises PromptError for a text that would not fit if it were the only one."""
        if (room := self.room(prompt, most)) < most:
            raise PromptError(
                f"a prompt of {prompt:,} tokens and {most:,} more take more than the "
                f"{sizes.show(self.nbytes)} of memory that are there for all texts: ask for at "
                f"most {room:,} tokens, or raise memory-budget"
            )

    def _row(self, prompt: int, columns: int) -> int:
        models = (self._target, self._draft, self._speculator)
        return sum(each.cache_nbytes(prompt, columns) for each in models if each is not None)
