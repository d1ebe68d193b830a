"""Proposers that ask others: several in turn, or the one that a caller wrote for one row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..core.proposer import GroupProposer, side_by_side
from ..core.row import Row
from ..errors import DecodingError
from ..types import Cached, Noise, Proposal, Proposer, Reusable, Scores, no_proposal


@dataclass(eq=False)
class FirstOf(GroupProposer):
    """A proposer that uses the first of several that does not abstain, so cheap proposers belong
    before expensive ones. A proposal names its proposer. limit: Returns how many tokens a proposer
    may draft now, for its name, the draft length, and the number of rows."""

    proposers: Mapping[str, GroupProposer]
    limit: Callable[[str, int, int], int]

    def __post_init__(self) -> None:
        parts = self.proposers.values()
        self.hidden = tuple(dict.fromkeys(name for part in parts for name in part.hidden))
        self.needs = tuple(dict.fromkeys(name for part in parts for name in part.needs))

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        return any(part.ready(rows, limited) for _, part, limited in self._allowed(limits))

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See GroupProposer. Each proposer drafts for the rows for which all before it have
        abstained."""
        made, places = no_proposal(len(rows)), range(len(rows))
        for name, part, limited in self._allowed(limits):
            if (proposal := part.propose(rows, limited, noise)).size:
                proposal = replace(proposal, source=name)
                if made.size:
                    best = [(made if made.count(row) else proposal).of(row) for row in places]
                    proposal = replace(side_by_side(best), source=name)
                made = proposal
                if all(map(made.count, places)):
                    break
        return made

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """See GroupProposer. All proposers observe, whichever of them drafted."""
        for part in self.proposers.values():
            part.observe(rows, scores)

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        states = (part.snapshot(row) for part in self.proposers.values())
        return {name: state for each in states for name, state in each.items()}

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        for part in self.proposers.values():
            part.restore(row, parts)

    def _allowed(self, limits: Sequence[int]) -> Iterator[tuple[str, GroupProposer, list[int]]]:
        """Yield the name, the proposer and the limits of each proposer that may draft now."""
        for name, part in self.proposers.items():
            most = self.limit(name, max(limits), len(limits))
            if (limited := [min(limit, most) for limit in limits]) and max(limited) > 0:
                yield name, part, limited


class Checked(GroupProposer):
    """A caller's own proposer, which drafts for one row. MLX reads outside of the embedding for an
    id beyond it, so such an id never reaches the target, and `observe` raises DecodingError.

    Args:
        vocabulary: The number of ids that the target's embedding has.
        width: The number of ids of a distribution."""

    def __init__(self, proposer: Proposer, vocabulary: int, width: int) -> None:
        self._own = proposer
        self.hidden = proposer.hidden
        self._name = type(proposer).__name__
        self._vocabulary, self._width = vocabulary, width
        self._valid = mx.array(True)
        self._begun: Row | None = None

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        return self._own.ready([rows[0].committed], limits[0])

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See GroupProposer. Raises DecodingError if the caller's proposer returns anything else
        than a proposal for one row."""
        [row], [limit] = rows, limits
        made = self._own.propose([row.committed], limit, noise)
        if wrong := self._wrong(made, limit):
            raise DecodingError(f"{self._name}.propose returned {wrong}")
        valid = (made.tokens >= 0) & (made.tokens < self._vocabulary)
        self._valid = mx.all(valid)
        mx.async_eval(self._valid)
        return replace(made, tokens=mx.where(valid, made.tokens, 0).astype(mx.int32))

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """See GroupProposer. The round is over, so that reading `_valid` does not block."""
        [row] = rows
        if self._begun is not row:
            self._begun = row
            self._own.begin([row.prompt])
        if not self._valid.item():
            raise DecodingError(
                f"{self._name} proposed a token that the target does not have: "
                f"propose ids from 0 to {self._vocabulary - 1}"
            )
        if row.seen:
            self._own.observe([row.seen], [scores.of(0, len(row.seen))])

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


def _misfit(name: str, value: object, kind: mx.DtypeCategory, *shape: int) -> str:
    """Return a description of a value that is no array of this kind and shape, else "". A length of
    -1 stands for any length."""
    if not isinstance(value, mx.array):
        return f"{name} of the type {type(value).__name__}"
    pairs = zip(shape, value.shape, strict=False)
    alike = len(shape) == value.ndim and all(wanted in (-1, length) for wanted, length in pairs)
    if alike and mx.issubdtype(value.dtype, kind):
        return ""
    return f"{name} of the shape {value.shape} and the type {value.dtype}"
