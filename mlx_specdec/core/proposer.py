"""The protocol of proposers, and how a proposer's context follows the rows of a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from ..types import Cached, Context, Noise, Proposal, Reusable, Scores, no_proposal
from .row import Row


class Proposer(Protocol):
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


@dataclass(eq=False)
class Aligned:
    """A context in a proposer's model, and the rows that it has, in order."""

    context: Context
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
    if len(proposals) == 1:
        return proposals[0]
    size = max(proposal.size for proposal in proposals)
    if size == 0:
        return no_proposal(len(proposals))
    padded = [mx.pad(row.tokens, [(0, 0), (0, size - row.size)]) for row in proposals]
    tokens, sources = mx.concatenate(padded), tuple(proposal.source for proposal in proposals)
    return Proposal(
        tokens,
        _logits(proposals, tokens),
        counts=tuple(proposal.count(0) for proposal in proposals),
        sources=sources if any(sources) else None,
    )


def _logits(proposals: Sequence[Proposal], tokens: mx.array) -> mx.array | None:
    """Return log q of all rows. For certain tokens and for padding, q is one-hot."""
    drawn = next((proposal.rows for proposal in proposals if proposal.rows is not None), None)
    if drawn is None:
        return None
    certain = mx.where(tokens[..., None] == mx.arange(drawn.shape[-1]), 0.0, -mx.inf)
    rows: list[Any] = []
    for place, proposal in enumerate(proposals):
        rows.append(certain[place : place + 1])
        if proposal.rows is not None:
            rows[-1] = mx.concatenate([proposal.rows, rows[-1][:, proposal.size :]], axis=1)
    return mx.concatenate(rows)
