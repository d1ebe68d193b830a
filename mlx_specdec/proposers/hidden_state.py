"""The proposer with a hidden-state drafter. A draft ends before the first token that is not worth
verifying. Only chances that are known before a token is drawn decide that, which keeps every rule
exact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx

from ..core.proposer import Proposer, side_by_side
from ..core.row import Row
from ..core.worth import Prices, Rate
from ..models.drafters.network import DrafterNetwork, Reading
from ..types import FINAL, Cached, Noise, Proposal, Reusable, Scores, no_proposal
from .draft_model import BACKLOG_CHUNK, draw
from .drafter import LONGEST_CONSIDERED, Drafter, LoadedPair, Setup

LAYERS_COUNTED = (
    ", or its config.json counts layers otherwise, which benchmarks/probe.py in the repository "
    "tells"
)
MOST_WAITING = 64
"""Number of hidden states that may wait for the next draft before the drafter reads them."""
MOST_WAITING_IN_PROMPT = 4096
"""Number of hidden states of a prompt that may wait for the first draft. Those of five layers of
width 5,120 take 200 MB in half precision."""
LEAST_CHANCE = 0.1
"""Least chance of a token for which the draft is cut. Tokens with a smaller chance are rare. To
look for them, the host waits for the draft, which costs more than to verify them."""
ESTIMATE_WEIGHT = 8.0
"""Prior strength in tokens: the weight of the drafter's estimate against its measured
acceptance."""
RATE_MEMORY = 200.0
"""Number of tokens after which the weight of earlier tokens falls to 1 / e."""


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.drafter_network is None:
        return None
    network = pair.drafter_network

    def make(setup: Setup) -> HiddenStateDrafter:
        return HiddenStateDrafter(network, setup.prices, setup.eager)

    made = Drafter(
        network.kind,
        make,
        most=min(network.most, LONGEST_CONSIDERED),
        stops=network.stops,
        nbytes=network.nbytes,
        identity=pair.draft_name or "",
    )
    return made if FINAL in network.hidden else replace(made, causes=made.causes + LAYERS_COUNTED)


class Confidence:
    """The choice of how many tokens of a draft are verified. It learns the ratio of accepted tokens
    to the tokens that the drafter expected to be accepted."""

    def __init__(self) -> None:
        self._rate, self._pending = Rate(1.0, ESTIMATE_WEIGHT, RATE_MEMORY), 0.0

    def learn(self, accepted: int) -> None:
        """Learn how many tokens of the last draft were accepted, if its chances were read."""
        if self._pending:
            self._rate.add(self._pending, accepted)
        self._pending = 0.0

    def worth(self, chances: mx.array, prices: Prices) -> int:
        """Return how many of the draft tokens to verify, at least one. `chances`, (1, count), are
        the probabilities of each token's acceptance if all tokens before it are accepted. They are
        read only if the costs can make a difference."""
        count = chances.shape[1]
        wanted = prices.least(count)
        if max(wanted[1:], default=0.0) < LEAST_CHANCE:
            return count
        values: Any = chances[0].tolist()
        expected, scale = list(accumulate(values, mul)), self._rate.share
        short = (at for at in range(1, count) if scale * expected[at] < wanted[at])
        end = next(short, count)
        self._pending = sum(expected[:end])
        return end


@dataclass(eq=False)
class DrafterState:
    """The state of one row in the drafter: its context, and hidden states that wait.

    Attributes:
        waits: Whether hidden states of the prompt wait for the first draft.
        attends: Whether the drafter has the encoder's output.
        hidden, tokens: The waiting hidden states, and the token that each belongs to."""

    reading: Reading
    waits: bool
    attends: bool = False
    hidden: list[mx.array] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    confidence: Confidence = field(default_factory=Confidence)

    def read(self, following: Sequence[int]) -> None:
        """Read the waiting hidden states up to the last one whose next token is known, and from now
        on soon after they arrive. following: The token after each of these states."""
        if not self.hidden:
            return
        self.waits, size = False, len(following)
        hidden = mx.concatenate(self.hidden, axis=1)
        for start in range(0, size, BACKLOG_CHUNK):
            if start > 0:
                self.reading.evaluate()
            part = following[start : start + BACKLOG_CHUNK]
            self.reading.read(hidden[:, start : start + len(part)], mx.array([part]))
        self.tokens = self.tokens[size:]
        # A copy, so that the memory of the earlier states can be released.
        self.hidden = [hidden[:, size:] + 0] if self.tokens else []


@dataclass(eq=False)
class HiddenStateDrafter(Proposer):
    """A proposer that drafts each row by itself.

    Attributes:
        prices: Returns the costs of rounds of this number of rows, or None.
        eager: Returns whether to read hidden states of the prompt before the first draft."""

    network: DrafterNetwork
    prices: Callable[[int], Prices | None] = lambda rows: None
    eager: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.hidden = self.network.hidden
        # The target returns no hidden states of tokens that come from its prefix cache.
        self.needs = (self.network.kind,)

    def restore(self, row: Row, parts: Mapping[str, Cached]) -> None:
        self._of(row).reading.restore([parts.get(self.network.kind)])

    def observe(self, rows: Sequence[Row], scores: Scores) -> None:
        """Collect the target's hidden states. If many wait, read all but the last, whose next token
        is not known."""
        for place, row in enumerate(rows):
            if row.seen:
                self._collect(self._of(row), row.seen, scores.of(place, len(row.seen)))

    def _collect(self, state: DrafterState, seen: Sequence[int], scores: Scores) -> None:
        if scores.encoded and not state.attends:
            state.attends = True
            state.reading.attend(scores.encoded[0])
        state.confidence.learn(len(seen) - 1)
        state.hidden.append(mx.concatenate([scores.hidden[name] for name in self.hidden], axis=-1))
        state.tokens += seen
        if len(state.tokens) > (MOST_WAITING_IN_PROMPT if state.waits else MOST_WAITING):
            state.read(state.tokens[1:])
            state.reading.evaluate()
            mx.eval(state.hidden)

    def snapshot(self, row: Row) -> Mapping[str, Reusable]:
        """See Proposer. Each position depends on a hidden state and on the token after it. With an
        encoder, nothing is reusable, since another prompt has another source."""
        state = self._of(row)
        if state.attends:
            return {}
        state.read(state.tokens[1:])
        return {self.network.kind: replace(state.reading.snapshot(0), lag=1)}

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        """See Proposer. Abstains if the target has not processed a token."""
        prices = self.prices(1) if len(rows) == 1 else None
        return side_by_side(
            [
                self._draft(row, min(limit, self.network.most), noise.of(place), prices)
                for place, (row, limit) in enumerate(zip(rows, limits, strict=True))
            ]
        )

    def _draft(self, row: Row, count: int, noise: Noise, prices: Prices | None) -> Proposal:
        state = self._of(row)
        reading = state.reading
        state.read([*state.tokens[1:], row.committed[-1]])
        length = reading.length
        if not (length and count):
            return no_proposal()
        proposal = draw([row], noise, count, reading.guess(count), reading.guess_after)
        reading.rewind((length,))
        if prices is None or (chances := reading.chances()) is None:
            return proposal
        return proposal.cut([state.confidence.worth(chances, prices)])

    def _of(self, row: Row) -> DrafterState:
        """Return the state of a row."""
        if self.network.kind not in row.state:
            row.state[self.network.kind] = DrafterState(self.network.open(), not self.eager())
        state: DrafterState = row.state[self.network.kind]
        return state
