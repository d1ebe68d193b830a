"""Proposers that contain proposers: several in turn, one for each sequence, one with limits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, Self

import mlx.core as mx

from ..errors import DecodingError
from ..interfaces import Noise, Prices, Proposal, Proposer, Scores, no_proposal
from ..interfaces.results import Cached, Reusable

Limit = Callable[[str, int, int], int]
"""Returns how many tokens a proposer may draft now. Arguments: the proposer's name, the draft
length, and the number of sequences."""


class Delegating(Proposer):
    """A proposer that passes all calls on to its parts. A subclass adds `propose`."""

    batches = True

    def __init__(self, parts: Iterable[Proposer]) -> None:
        self._parts = list(parts)
        self.taps = tuple(dict.fromkeys(tap for part in self._parts for tap in part.taps))
        self.needs = tuple(dict.fromkeys(name for part in self._parts for name in part.needs))

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        for part, arguments in self._shares(lengths, cached):
            part.recall(*arguments)

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        return {
            name: state for part in self._parts for name, state in part.reusable(sequence).items()
        }

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        for part, arguments in self._shares(prompts):
            part.begin(*arguments)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return any(part.ready(tokens, limit) for part, [tokens] in self._shares(committed))

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """See Proposer. All parts observe, whichever of them proposed."""
        for part, arguments in self._shares(tokens, scores):
            part.observe(*arguments)

    def join(self, other: Self) -> None:
        for part, joining in zip(self._parts, other._parts, strict=True):
            part.join(joining)

    def filter(self, keep: Sequence[int]) -> None:
        for part in self._parts:
            part.filter(keep)

    def _shares(self, *lists: Sequence[Any]) -> Iterable[tuple[Proposer, Sequence[Any]]]:
        """Yield each part with its share of lists that have one entry per sequence."""
        return ((part, lists) for part in self._parts)


class FirstOf(Delegating):
    """A proposer that uses the first of several that does not abstain, so cheap proposers belong
    before expensive ones. A proposal names its source."""

    def __init__(self, proposers: Mapping[str, Proposer], limit: Limit) -> None:
        super().__init__(proposers.values())
        self._names = tuple(proposers)
        self._limit = limit

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        allowed = self._limited(limit, len(committed))
        return any(part.ready(committed, count) for _, part, count in allowed)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. In a batch, each part proposes for the sequences for which all parts before
        it have abstained."""
        made, rows = no_proposal(len(committed)), range(len(committed))
        for name, part, count in self._limited(limit, len(committed)):
            if (proposal := part.propose(committed, count, noise)).size:
                proposal = replace(proposal, source=name)
                if made.size:
                    best = [(made if made.count(row) else proposal).of(row) for row in rows]
                    proposal = replace(side_by_side(best), source=name)
                made = proposal
                if all(map(made.count, rows)):
                    break
        return made

    def _limited(self, limit: int, rows: int) -> Iterable[tuple[str, Proposer, int]]:
        """Yield the name, the proposer and the limit of each proposer that may draft now."""
        for name, part in zip(self._names, self._parts, strict=True):
            if (count := self._limit(name, limit, rows)) > 0:
                yield name, part, count


class RowByRow(Delegating):
    """A proposer of a batch, with a proposer of one sequence for each row.

    Args:
        make: Makes a proposer of one sequence.
        prices: Returns the costs of rounds of a batch with this number of rows, or None. If they
            are known, and all parts know the chances of their drafts, the batch drafts as many
            tokens as pay for all rows together."""

    def __init__(
        self,
        make: Callable[[], Proposer],
        prices: Callable[[int], Prices | None] = lambda rows: None,
    ) -> None:
        super().__init__([make()])
        self._make, self._prices = make, prices

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return self._most(committed, limit) > 0

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        return self._parts[sequence].reusable(0)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        if not (most := self._most(committed, limit)):
            return no_proposal(len(committed))
        rows = enumerate(self._shares(committed))
        made = [part.propose(tokens, limit, noise.of(row)) for row, (part, [tokens]) in rows]
        return side_by_side([proposal.cut([most]) for proposal in made])

    def _most(self, committed: Sequence[Sequence[int]], limit: int) -> int:
        """Return how many tokens a row should draft at most."""
        ready = [part for part, [row] in self._shares(committed) if part.ready(row, limit)]
        prices = self._prices(len(committed)) if ready else None
        if prices is None or not all(part.chances for part in ready):
            return limit if ready else 0
        columns = zip_longest(*(part.chances for part in ready), fillvalue=0.0)
        return prices.worth([sum(column) / len(committed) for column in columns])

    def join(self, other: Self) -> None:
        self._parts += other._parts

    def filter(self, keep: Sequence[int]) -> None:
        self._parts = [self._parts[row] for row in keep]

    def _shares(self, *lists: Sequence[Any]) -> Iterable[tuple[Proposer, Sequence[Any]]]:
        self._parts += [self._make() for _ in range(len(lists[0]) - len(self._parts))]
        rows = zip(self._parts, *lists, strict=True)
        return ((part, [[entry] for entry in row]) for part, *row in rows)


class Limited(Delegating):
    """A proposer whose proposals are cut to the limits of the sequences, in tokens per round."""

    def __init__(self, proposer: Proposer, limits: Sequence[int]) -> None:
        super().__init__([proposer])
        self._limits = list(limits)

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        most = min(limit, max(self._limits))
        return most > 0 and super().ready(committed, most)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        most = min(limit, max(self._limits))
        if most == 0:
            return no_proposal(len(committed))
        return self._parts[0].propose(committed, most, noise).cut(self._limits)

    def join(self, other: Self) -> None:
        super().join(other)
        self._limits += other._limits

    def filter(self, keep: Sequence[int]) -> None:
        super().filter(keep)
        self._limits = [self._limits[row] for row in keep]


class Checked(Delegating):
    """A proposer of one sequence that a caller wrote. MLX reads outside of the embedding for an id
    beyond it, so such an id never reaches the target, and `observe` raises DecodingError.

    Args:
        vocabulary: The number of ids that the target's embedding has.
        width: The number of ids of a distribution."""

    def __init__(self, proposer: Proposer, vocabulary: int, width: int) -> None:
        super().__init__([proposer])
        self._name = type(proposer).__name__
        self._vocabulary, self._width = vocabulary, width
        self._valid = mx.array(True)

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Raises DecodingError if the caller's proposer returns anything else than a
        proposal for one sequence."""
        made = self._parts[0].propose(committed, limit, noise)
        if wrong := self._wrong(made, limit):
            raise DecodingError(f"{self._name}.propose returned {wrong}")
        valid = (made.tokens >= 0) & (made.tokens < self._vocabulary)
        self._valid = mx.all(valid)
        mx.async_eval(self._valid)
        return replace(made, tokens=mx.where(valid, made.tokens, 0).astype(mx.int32))

    def _wrong(self, made: object, limit: int) -> str:
        """Return what is wrong with a proposal and what to return instead; "" if it is usable."""
        if not isinstance(made, Proposal):
            found = f"an object of the type {type(made).__name__}"
            return f"{found}: return a Proposal, such as Proposal.one_hot([ids])"
        if found := _misfit("tokens", made.tokens, mx.integer, 1, -1):
            return f"{found}: return integers of the shape (1, n)"
        if made.size > limit:
            return f"{made.size} tokens where the limit is {limit}: return at most that many"
        shape = 1, made.size, self._width
        if made.rows is not None and (found := _misfit("rows", made.rows, mx.floating, *shape)):
            return f"{found}: return None or log q of the shape {shape}"
        return ""

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """See Proposer. The round is over, so that reading `_valid` does not block."""
        if not self._valid.item():
            raise DecodingError(
                f"{self._name} proposed a token that the target does not have: "
                f"propose ids from 0 to {self._vocabulary - 1}"
            )
        super().observe(tokens, scores)


def _misfit(name: str, value: object, kind: mx.DtypeCategory, *shape: int) -> str:
    """Return a description of a value that is no array of this kind and shape, else "". A length of
    -1 stands for any length."""
    if not isinstance(value, mx.array):
        return f"{name} of the type {type(value).__name__}"
    alike = len(shape) == value.ndim and all(
        wanted in (-1, length) for wanted, length in zip(shape, value.shape, strict=True)
    )
    if alike and mx.issubdtype(value.dtype, kind):
        return ""
    return f"{name} of the shape {value.shape} and the type {value.dtype}"


def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
    """Return one proposal for all rows, from proposals for one sequence each. Shorter proposals are
    padded."""
    size = max(proposal.size for proposal in proposals)
    if size == 0:
        return no_proposal(len(proposals))
    padded = [mx.pad(row.tokens, [(0, 0), (0, size - row.size)]) for row in proposals]
    tokens, sources = mx.concatenate(padded), tuple(proposal.source for proposal in proposals)
    return Proposal(
        tokens,
        _rows(proposals, tokens),
        counts=tuple(proposal.count(0) for proposal in proposals),
        sources=sources if any(sources) else None,
    )


def _rows(proposals: Sequence[Proposal], tokens: mx.array) -> mx.array | None:
    """Return the logits of all rows. The logits of certain tokens and of padding are one-hot."""
    drawn = next((proposal.rows for proposal in proposals if proposal.rows is not None), None)
    if drawn is None:
        return None
    certain = mx.where(tokens[..., None] == mx.arange(drawn.shape[-1]), 0.0, -mx.inf)
    rows = []
    for row, proposal in enumerate(proposals):
        rows.append(certain[row : row + 1])
        if proposal.rows is not None:
            rows[-1] = mx.concatenate([proposal.rows, rows[-1][:, proposal.size :]], axis=1)
    return mx.concatenate(rows)
