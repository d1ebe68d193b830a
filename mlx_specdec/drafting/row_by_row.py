"""A proposer of its own for every sequence of a batch, for those that know one sequence only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import mlx.core as mx

from ..contracts import Noise, Proposal, Proposer, Scores, no_proposal
from ..kept import Kept, Memory


class RowByRow(Proposer):
    """Proposer of a batch. make: makes one for a sequence."""

    batches = True

    def __init__(self, make: Callable[[], Proposer]) -> None:
        self._make = make
        self._rows = [make()]
        self.taps, self.needs = self._rows[0].taps, self._rows[0].needs

    def recall(self, lengths: Sequence[int], kept: Sequence[Mapping[str, Kept]]) -> None:
        """Each recalls what is its own."""
        self._make_rows(len(lengths))
        for row, length, its in zip(self._rows, lengths, kept, strict=True):
            row.recall([length], [its])

    def memories(self, sequence: int) -> Mapping[str, Memory]:
        """Those of the sequence's own."""
        return self._rows[sequence].memories(0)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Each begins with its own prompt."""
        self._make_rows(len(prompts))
        for row, prompt in zip(self._rows, prompts, strict=True):
            row.begin([prompt])

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether any of them would draft."""
        return any(
            row.ready([text], limit) for row, text in zip(self._rows, committed, strict=True)
        )

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What each one proposes; sequences whose proposer abstains have none."""
        return side_by_side(
            [
                row.propose([text], limit, noise.of(number))
                for number, (row, text) in enumerate(zip(self._rows, committed, strict=True))
            ]
        )

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Each sees its own sequence."""
        for row, kept, its in zip(self._rows, tokens, scores, strict=True):
            row.observe([kept], [its])

    def join(self, other: RowByRow) -> None:
        """As contracts.Proposer says."""
        self._rows += other._rows

    def filter(self, keep: Sequence[int]) -> None:
        """As contracts.Proposer says."""
        self._rows = [self._rows[row] for row in keep]

    def _make_rows(self, count: int) -> None:
        self._rows += [self._make() for _ in range(count - len(self._rows))]


def side_by_side(proposals: Sequence[Proposal]) -> Proposal:
    """One rectangle from proposals for one sequence each; shorter ones are filled up."""
    size = max(each.size for each in proposals)
    if size == 0:
        return no_proposal(len(proposals))
    tokens = mx.concatenate(
        [mx.pad(each.tokens, [(0, 0), (0, size - each.size)]) for each in proposals]
    )
    sources = tuple(each.source for each in proposals)
    return Proposal(
        tokens,
        _rows(proposals, tokens),
        counts=tuple(each.count(0) for each in proposals),
        sources=sources if any(sources) else None,
    )


def _rows(proposals: Sequence[Proposal], tokens: mx.array) -> mx.array | None:
    drawn = next((each.rows for each in proposals if each.rows is not None), None)
    if drawn is None:
        return None
    certain = mx.where(tokens[..., None] == mx.arange(drawn.shape[-1]), 0.0, -mx.inf)
    return mx.concatenate(
        [
            certain[row : row + 1]
            if each.rows is None
            else mx.concatenate([each.rows, certain[row : row + 1, each.size :]], axis=1)
            for row, each in enumerate(proposals)
        ]
    )
