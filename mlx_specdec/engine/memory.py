"""How many sequences to decode together, and the bytes of memory that they need."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from ..checkpoints import disk
from ..decoding.loop import chunk
from ..errors import PromptError
from ..proposers.draft_model import CHUNK
from ..proposers.drafter import Drafter
from .pair import Pair

FIRST = 16
MOST = 64
WORTH_DOUBLING = 1.05
"""The gain in speed for which twice the sequences are worth twice the memory, and later ends."""


@dataclass
class BatchSize:
    """A fixed number of sequences that may be decoded together."""

    size: int

    def took(self, tokens: int, seconds: float) -> None:
        """Learn that `size` sequences gave so many tokens in so many seconds."""


class AutoBatchSize(BatchSize):
    """Doubles while that brings more tokens a second, and halves where that costs none."""

    def __init__(self, first: int = FIRST, most: int = MOST) -> None:
        super().__init__(min(first, most))
        self._most = most
        self._rates: dict[int, float] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """Learn from a stretch of decoding, and choose the next size."""
        self._rates[self.size] = tokens / max(seconds, 1e-9)
        best = min(self._rates)
        for size, rate in sorted(self._rates.items()):
            if rate > WORTH_DOUBLING * self._rates[best]:
                best = size
        untried = [size for size in (2 * best, best // 2) if size not in self._rates]
        self.size = next((size for size in untried if 1 <= size <= self._most), best)


SPARE = 1 / 4
"""The bytes that may lie unused in the caches of a group, as a share of the target's weights.
Another group costs another pass over all weights in every round."""
RESERVE = 1 / 16
"""The share of the usable memory that is left to passes; a default budget is never smaller."""


@dataclass(frozen=True)
class Extent:
    """Lengths in tokens: of a prompt, of its caches now, and of these at max_tokens."""

    prompt: int
    now: int
    end: int


def even(sizes: Sequence[int], spare: float) -> bool:
    """Return whether padding rows to the largest takes at most `spare`, or doubles the others."""
    longest, whole = max(sizes), sum(sizes)
    return longest * len(sizes) - whole <= max(spare, whole - longest)


def default_budget(pair: Pair, cached: int) -> int:
    """Return the bytes that the machine has for texts: its usable memory without the weights, a
    reserve for passes, and the `cached` bytes of a prompt cache (at most half of what is left)."""
    usable = disk.usable_memory()
    reserve = int(RESERVE * usable)
    rest = max(0, usable - pair.target.nbytes - pair.draft_bytes - reserve)
    return max(reserve, rest - min(cached, rest // 2))


class MemoryBudget:
    """A number of bytes for all sequences, and how many of them each sequence needs. chosen: the
    drafters. nbytes: the budget; None takes `default_budget`. cached: bytes that a prompt cache may
    take. step: tokens of a prompt in one pass; None takes `chunk`."""

    def __init__(
        self,
        pair: Pair,
        chosen: Sequence[Drafter],
        nbytes: int | None = None,
        cached: int = 0,
        step: int | None = None,
    ) -> None:
        self.nbytes = default_budget(pair, cached) if nbytes is None else nbytes
        names, network = {each.name for each in chosen}, pair.drafter_network
        self._target = pair.target
        self._draft = pair.draft if "draft" in names else None
        self._network = network if network is not None and network.kind in names else None
        self._spare = SPARE * pair.target.nbytes
        self._most_a_round = 1 + max((each.most for each in chosen), default=0)
        self._step = step
        self.of_caches([Extent(1, 1, 1)])  # arrays of all kinds are met here, in this thread

    def even(self, rows: Sequence[Extent]) -> bool:
        """Return whether caches of these lengths waste little memory as one group."""
        return even([self._row(each.prompt, each.now) for each in rows], self._spare)

    def of_caches(self, rows: Sequence[Extent]) -> int:
        """Return the most bytes that the caches of a group can need. Every row is as wide as the
        longest of the group, which grows by at most a whole round for each token that the row may
        still emit. A draft reads the prompt of a row that has joined behind the longest."""
        prompt, now, end = (max(each) for each in zip(*map(astuple, rows), strict=True))
        late = min(end, CHUNK) if len(rows) > 1 else 0
        return sum(
            self._row(prompt, min(end, now + self._most_a_round * (row.end - row.now)), late)
            for row in rows
        )

    def of_reading(self, rows: Sequence[Extent]) -> int:
        """Estimate the bytes of working memory for reading a group's prompts chunk by chunk."""
        longest = max(each.prompt for each in rows)
        step = self._step or chunk(len(rows), holds_scores=self._target.holds_scores)
        return len(rows) * self._target.reading_nbytes(longest, min(step, longest))

    def room(self, prompt: int, most: int) -> int:
        """Return how many of `most` tokens fit behind a prompt. Raises PromptError for none."""
        seen = len(self._target.prefix([0] * prompt))

        def alone(generated: int) -> int:
            rows = [Extent(prompt, seen, seen + generated)]
            return self.of_caches(rows) + self.of_reading(rows)

        if alone(most) <= self.nbytes:
            return most
        fits = bisect_right(range(most), self.nbytes, key=alone) - 1
        if fits < 1:
            raise PromptError(
                f"the prompt has {prompt:,} tokens, which take {disk.show(alone(1))} of memory, "
                f"and {disk.show(self.nbytes)} are there for all texts: shorten it, or raise "
                "memory-budget"
            )
        return fits

    def check(self, prompt: int, most: int) -> None:
        """Raises PromptError for a text that would not fit if it were the only one."""
        if (room := self.room(prompt, most)) < most:
            raise PromptError(
                f"a prompt of {prompt:,} tokens and {most:,} more take more than the "
                f"{disk.show(self.nbytes)} of memory that are there for all texts: ask for at "
                f"most {room:,} tokens, or raise memory-budget"
            )

    def _row(self, prompt: int, columns: int, late: int = 0) -> int:
        nbytes = self._target.cache_nbytes(prompt, columns)
        if self._network is not None:
            nbytes += self._network.cache_nbytes(prompt, columns)
        if self._draft is not None:
            nbytes += self._draft.cache_nbytes(prompt, columns + late)
        return nbytes
