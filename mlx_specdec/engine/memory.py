"""The number of sequences to decode together, and the bytes of memory that they need."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial

from .. import system
from ..core.loop import chunk_size
from ..core.options import MOST_DRAFTED
from ..errors import PromptError
from ..proposers.draft_model import BACKLOG_CHUNK
from ..system import show_size
from .pair import Pair

FIRST_BATCH_SIZE = 16
"""The first batch size that an automatic BatchSize tries."""
LARGEST_BATCH_SIZE = 64
"""The largest batch size that an automatic BatchSize tries."""
WORTH_DOUBLING = 1.05
"""Least ratio of tokens per second for which a larger batch is preferred: it needs more memory, and
each sequence takes longer."""


class BatchSize:
    """The number of sequences that are decoded together. If it is automatic, it doubles as long as
    tokens per second increase, and halves if that costs no speed.

    Args:
        size: The size, or the first one that is tried.
        most: The largest size that is tried; None means that the size is fixed."""

    def __init__(self, size: int = FIRST_BATCH_SIZE, most: int | None = None) -> None:
        self.size = size if most is None else min(size, most)
        self._most = most
        self._rates: dict[int, float] = {}

    def took(self, tokens: int, seconds: float) -> None:
        """Record the seconds in which `size` sequences emitted tokens, and choose the next size."""
        if self._most is None:
            return
        self._rates[self.size] = tokens / max(seconds, 1e-9)
        best = min(self._rates)
        for size, rate in sorted(self._rates.items()):
            if rate > WORTH_DOUBLING * self._rates[best]:
                best = size
        untried = [size for size in (2 * best, best // 2) if size not in self._rates]
        self.size = next((size for size in untried if 1 <= size <= self._most), best)


SPARE = 1 / 4
"""Limit of the padding in the caches of one batch, as a share of the bytes of the target's weights.
Several batches need less padding, but another pass over all weights in every round."""
RESERVE = 1 / 16
"""The share of the usable memory that is reserved for passes. It is also the smallest default
budget."""


@dataclass(frozen=True)
class Extent:
    """Numbers of tokens of one request.

    Attributes:
        prompt: Length of the prompt.
        now: Length of the KV cache now.
        end: Length of the KV cache after max_tokens tokens."""

    prompt: int
    now: int
    end: int


def even(sizes: Sequence[int], spare: float) -> bool:
    """Return whether padding all rows to the largest row takes little memory: at most `spare`, or
    at most as much as the other rows need. sizes: Of the rows; in the unit of `spare`."""
    longest, total = max(sizes), sum(sizes)
    return longest * len(sizes) - total <= max(spare, total - longest)


def default_budget(weights: int, cached: int) -> int:
    """Return the bytes that are available for sequences: the usable memory without the weights, the
    reserve for passes, and a prompt cache. Such a cache is charged at most half of the rest.
    weights: Bytes of the weights. cached: Limit of the prompt cache in bytes."""
    usable = system.usable_memory()
    reserve = int(RESERVE * usable)
    rest = max(0, usable - weights - reserve)
    return max(reserve, rest - min(cached, rest // 2))


class MemoryBudget:
    """The memory budget of all sequences, and estimates of their needs. Every draft model and
    drafter of the pair counts, whether a sequence uses it or not.

    Args:
        nbytes: The budget in bytes, or None for `default_budget`.
        cached: Limit of the prompt cache in bytes, for the default budget.
        step: Number of prompt tokens in one pass, or None for `chunk_size`."""

    def __init__(
        self,
        pair: Pair,
        nbytes: int | None = None,
        cached: int = 0,
        step: int | None = None,
    ) -> None:
        weights = pair.target.nbytes + pair.draft_bytes
        self.nbytes = default_budget(weights, cached) if nbytes is None else nbytes
        self._target = pair.target
        self._drafting = [one for one in (pair.draft, pair.drafter_network) if one is not None]
        self._spare = SPARE * pair.target.nbytes
        self._step = step
        self.of_caches([Extent(1, 1, 1)])  # models measure their caches now, in this thread

    def even(self, rows: Sequence[Extent]) -> bool:
        """Return whether rows of these lengths need little padding in one batch."""
        return even([self._row(row.prompt, row.now) for row in rows], self._spare)

    def of_caches(self, rows: Sequence[Extent]) -> int:
        """Return an upper bound on the bytes of a batch's caches.

        Every row is as wide as the longest row of the batch. The longest row grows by at most one
        round for each token that the row may still emit. A drafter prefills the prompt of a row
        that has joined the batch at positions after the longest row."""
        prompt, now, end = (max(lengths) for lengths in zip(*map(astuple, rows), strict=True))
        late = min(end, BACKLOG_CHUNK) if len(rows) > 1 else 0
        grown = (now + (1 + MOST_DRAFTED) * (row.end - row.now) for row in rows)
        return sum(self._row(prompt, min(end, positions), late) for positions in grown)

    def of_prefill(self, rows: Sequence[Extent]) -> int:
        """Estimate the bytes of working memory for the prefill of a batch's prompts in chunks."""
        longest = max(row.prompt for row in rows)
        step = self._step or chunk_size(len(rows), holds_scores=self._target.holds_scores)
        return len(rows) * self._target.prefill_nbytes(longest, min(step, longest))

    def room(self, prompt: int, most: int) -> int:
        """Return how many tokens, at most `most`, fit after a prompt of `prompt` tokens if it is
        the only sequence. Raises PromptError if not even one token fits."""
        fits = bisect_right(range(most + 1), self.nbytes, key=partial(self.alone, prompt)) - 1
        if fits < min(1, most):
            nbytes = self.alone(prompt, 1)
            raise PromptError(
                f"the prompt has {prompt:,} tokens, which take {show_size(nbytes)} of memory, "
                f"and {show_size(self.nbytes)} are there for all texts: shorten it, or raise "
                "memory-budget"
            )
        return fits

    def longest_prompt(self, most: int) -> int:
        """Return the length, at most `most`, of the longest prompt that fits with one more token
        if it is the only sequence."""
        lengths = range(1, most + 1)
        return bisect_right(lengths, self.nbytes, key=lambda prompt: self.alone(prompt, 1))

    def alone(self, prompt: int, generated: int) -> int:
        """Return the bytes of the only sequence, with `prompt` tokens of a prompt and `generated`
        tokens after it."""
        cached = len(self._target.prefix([0] * prompt))
        rows = [Extent(prompt, cached, cached + generated)]
        return self.of_caches(rows) + self.of_prefill(rows)

    def check(self, prompt: int, most: int) -> None:
        """Raise PromptError if `most` tokens after a prompt do not fit, even as the only
        sequence."""
        if (room := self.room(prompt, most)) < most:
            raise PromptError(
                f"a prompt of {prompt:,} tokens and {most:,} more take more than the memory "
                f"budget for all texts, {show_size(self.nbytes)}: ask for at "
                f"most {room:,} tokens, or raise memory-budget"
            )

    def _row(self, prompt: int, positions: int, late: int = 0) -> int:
        nbytes = self._target.cache_nbytes(prompt, positions)
        drafting = (model.cache_nbytes(prompt, positions + late) for model in self._drafting)
        return nbytes + sum(drafting)
