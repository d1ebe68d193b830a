"""The protocol of proposers, the description of a proposer before it exists, and how a proposer's
context follows the rows of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..types import Cached, Noise, Proposal, Reusable, Scores
from .row import Row

LONGEST_DRAFT = 16
"""The longest draft of a proposer with weights, in tokens, and the longest that is timed."""


class GroupProposer(Protocol):
    """A source of draft tokens for the rows of a group. It keeps its state of a row in `row.state`.
    So one object serves all groups, and is not notified of rows that join or leave.

    A proposer never sees the target's probabilities of positions that it has yet to draft."""

    hidden: tuple[str, ...] = ()
    """Names of the target's hidden states that `observe` needs."""
    needs: tuple[str, ...] = ()
    """Names of the cached states that `restore` requires for all cached tokens of the target."""

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        """Return whether `propose` would draft anything now. The loop calls this while a plain step
        is in flight. It must be cheap and must not change later proposals."""
        return True

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """Draft tokens after each row, without blocking.

        Args:
            rows: All rows of the group, in order.
            limits: The most draft tokens of each row. A row with 0 drafts nothing, and its state
                keeps step with the others."""

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Receive the target's results for a chunk of the prompts or for a round. The loop does not
        call this after the last round.

        Args:
            rows: All rows of the group. `row.seen` are the tokens that the target has processed
                since the last call; the newest committed token is not among them.
            scores: The target's results; `scores.of(place, len(row.seen))` are a row's own."""
        return None

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        """Return the state, by name, that a row which shares a prefix may restore."""
        return {}

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        """Receive the cached state of a new row: at most `row.processed` tokens, by name."""
        return None


@dataclass(frozen=True)
class Prices:
    """The measured costs of rounds, in plain decoding steps.

    Attributes:
        rounds: Entry n is the cost of a round with draft length n.
        rate: The tokens per plain step's time that the best alternative brings."""

    rounds: Sequence[float]
    rate: float

    def most(self, chances: Sequence[float]) -> int:
        """Return the draft length whose expected tokens exceed its cost by most; 0 if no draft
        length is worth it.

        Args:
            chances: See `worth.values`; of several rows, the mean over them."""
        tokens = accumulate(chances, initial=1.0)
        gains = [count - self.rate * cost for count, cost in zip(tokens, self.rounds, strict=False)]
        best = max(range(len(gains)), key=gains.__getitem__)
        return best if gains[best] > 0 else 0

    def least(self, count: int) -> list[float]:
        """Return for each of `count` draft tokens the least probability of acceptance at which its
        verification pays. Costs need not be linear: several tokens may cost as much as one."""
        costs = np.array(self.rounds[: count + 1])
        steps = range(1, count + 1)
        rises = [(costs[at:] - costs[at - 1]) / np.arange(1, count + 2 - at) for at in steps]
        return [self.rate * float(rise.min()) for rise in rises]


@dataclass(frozen=True)
class Setup:
    """How a proposer works together with others.

    Attributes:
        followed: Whether another proposer drafts if this one abstains.
        eager: Returns whether the proposer should prefill before its first draft.
        prices: Returns the measured costs of rounds of a number of rows; None if the proposer must
            not choose its own draft length."""

    followed: bool = False
    eager: Callable[[], bool] = lambda: True
    prices: Callable[[int], Prices | None] = lambda rows: None


@dataclass(frozen=True)
class Drafter:
    """A proposer that a pair supports, as the choice of the draft length sees it.

    Attributes:
        name: Name of the proposer.
        make: Makes the proposer.
        most: Largest draft length to consider, in tokens.
        nbytes: Size of the weights in bytes. A drafter without weights costs almost nothing.
        identity: Distinguishes drafters of the same name, such as draft models.
        stops: Whether the proposer shortens its proposals by `Setup.prices`.
        costs: Name under which its costs are saved.
        text: Name under which its acceptance is saved."""

    name: str
    make: Callable[[Setup], GroupProposer]
    most: int = LONGEST_DRAFT
    nbytes: int = 0
    identity: str = ""
    stops: bool = False
    costs: str = "draft"
    text: str = "draft"

    @property
    def free(self) -> bool:
        """Whether the proposer has no weights."""
        return not self.nbytes


@dataclass(eq=False)
class Aligned:
    """A context of a proposer, and its rows in order. The context has the methods `merge`, `keep`
    and `snapshot` of `types.Context`."""

    context: Any
    rows: list[Row]


def align(rows: Sequence[Row], name: str) -> Aligned:
    """Return one context with these rows in this order, from the contexts `row.state[name]` that
    they have had. Rows that are not among them leave. This costs nothing if the rows are the
    same as last time."""
    parts: list[Aligned] = list(dict.fromkeys(row.state[name] for row in rows))
    first = parts[0]
    if len(parts) == 1 and first.rows == rows:
        return first
    for part in parts:
        _keep(part, [row for row in part.rows if row in rows])
    for part in parts[1:]:
        first.context.merge(part.context)
        first.rows = first.rows + part.rows
    _keep(first, list(rows))
    for row in rows:
        row.state[name] = first
    return first


def _keep(part: Aligned, rows: list[Row]) -> None:
    if rows != part.rows:
        part.context.keep([part.rows.index(row) for row in rows])
        part.rows = rows


def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
    """Return one proposal for all rows, from proposals for one row each. Shorter proposals are
    padded."""
    size = max(proposal.size for proposal in proposals)
    width = next((one.rows.shape[-1] for one in proposals if one.rows is not None), 0)

    def joined(arrays: Sequence[mx.array]) -> mx.array:
        axes = [(0, 0)] * (arrays[0].ndim - 2)
        missing = [[(0, 0), (0, size - array.shape[1]), *axes] for array in arrays]
        return mx.concatenate(list(map(mx.pad, arrays, missing)))

    def logits(proposal: Proposal) -> mx.array:
        """Return log q. For tokens that are certain, q is one-hot."""
        certain = proposal.tokens[..., None] == mx.arange(width)
        return mx.where(certain, 0.0, -mx.inf) if proposal.rows is None else proposal.rows

    sources = tuple(proposal.source for proposal in proposals)
    return Proposal(
        joined([proposal.tokens for proposal in proposals]),
        joined(list(map(logits, proposals))) if width else None,
        counts=tuple(proposal.count(0) for proposal in proposals),
        sources=sources if any(sources) else None,
    )
