"""A hidden-state drafter proposes, and ends its drafts before the first token not worth verifying.
Only chances that are known before a token is drawn decide that, so that every rule stays exact."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

import mlx.core as mx

from ..interfaces import FINAL, Noise, Prices, Proposal, Proposer, Scores, no_proposal
from ..interfaces.results import Cached, Reusable
from ..models.drafters.network import DrafterNetwork
from ..sampling.distribution import Distribution
from ..sampling.settings import Sampling
from .draft_model import draw
from .drafter import MOST_DRAFTED, Drafter, LoadedPair, Setup

LAYERS_COUNTED = (
    ", or its config.json counts layers otherwise, which mlx-specdec inspect --probe tells"
)
UNREAD = 64
"""Rows that may wait for the next guess. Those of a prompt that a drafter reads beside the target
are read as they come."""
WAITING = 4096
"""Rows of a prompt that may wait for the first guess: five states of 5,120 numbers each take 200
MB in half precision."""
LEAST_CHANCE = 0.1
"""Tokens with a smaller chance are so rare that looking for them, which waits for the draft, costs
more than they do."""
PRIOR = 8.0
"""Tokens that a drafter's own estimate counts as much as."""
MEMORY = 200.0
"""Tokens after which earlier ones count a third (1 / e)."""


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.drafter_network is None:
        return None
    network = pair.drafter_network

    def make(setup: Setup) -> HiddenStateDrafter:
        given = network, setup.sampling, pair.vocabulary, setup.prices
        return HiddenStateDrafter(*given, eager=setup.eager)

    made = Drafter(
        network.kind,
        make,
        most=min(network.most, MOST_DRAFTED),
        stops=network.stops,
        nbytes=network.nbytes,
        identity=pair.draft_name or "",
    )
    return made if FINAL in network.taps else replace(made, causes=made.causes + LAYERS_COUNTED)


@dataclass(eq=False)
class HiddenStateDrafter(Proposer):
    """Proposer of one sequence. settings, vocabulary: the target's. prices, eager: see Setup."""

    network: DrafterNetwork
    settings: Sampling
    vocabulary: int
    prices: Callable[[], Prices | None] | None = None
    eager: bool = True

    def __post_init__(self) -> None:
        self.taps = self.network.taps
        # The target shows no hidden states of tokens that it does not read again.
        self.needs = (self.network.kind,)
        self._recalled: Cached | None = None
        self._confidence = Confidence()

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        self._recalled = cached[0].get(self.network.kind)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [prompt] = prompts
        self._distributions = [Distribution(self.settings, self.vocabulary, prompt)]
        self._reading = self.network.open()
        self._attends = False
        if self._recalled is not None:
            self._reading.recall([self._recalled])
            self._recalled = None
        self._hidden: list[mx.array] = []
        self._tokens: list[int] = []
        # Chunks of a prompt that are read before the first guess.
        self._late: list[tuple[mx.array, mx.array]] = []
        self._confidence.forget()

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Collect the target's hidden states. Many of them are read at once, all but the last,
        whose next token is not known."""
        [accepted], [its] = tokens, scores
        if not accepted:
            return
        if its.encoded and not self._attends:
            self._attends = True
            self._reading.attend(its.encoded[0])
        self._confidence.learn(len(accepted) - 1)
        self._hidden.append(mx.concatenate([its.hidden[tap] for tap in self.taps], axis=-1))
        self._tokens += accepted
        if len(self._tokens) > UNREAD:
            self._take()
            if self.eager or sum(hidden.shape[1] for hidden, _ in self._late) > WAITING:
                self._read()

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """See Proposer. Each column was made of a hidden state and the token after it. None for an
        encoder-decoder target: another text has another source."""
        if self._attends:
            return {}
        if len(self._tokens) > 1:
            self._take()
        self._read()
        return {self.network.kind: replace(self._reading.reusable(sequence), lag=1)}

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Abstains where the target has not seen a token."""
        self._read()
        if self._hidden:
            following = [*self._tokens[1:], committed[0][-1]]
            hidden = mx.concatenate(self._hidden, axis=1)
            self._reading.read(hidden, mx.array([following], dtype=mx.int32))
            self._hidden, self._tokens = [], []
        length, count = self._reading.length, min(limit, self.network.most)
        if not length:
            return no_proposal()
        logits, after = self._reading.guess(count), self._reading.guess_after
        proposal = draw(self._distributions, committed, noise, count, logits, after)
        self._reading.rewind((length,))
        prices = None if self.prices is None else self.prices()
        if prices is None or (chances := self._reading.chances()) is None:
            return proposal
        return replace(proposal, counts=(self._confidence.worth(chances, prices),)).of(0)

    def _read(self) -> None:
        self.eager = self.eager or bool(self._late)
        for hidden, following in self._late:
            self._reading.read(hidden, following)
            self._reading.evaluate()
        self._late = []

    def _take(self) -> None:
        """Set the hidden states aside to be read, all but the last."""
        hidden = mx.concatenate(self._hidden, axis=1)
        self._late.append((hidden[:, :-1], mx.array([self._tokens[1:]], dtype=mx.int32)))
        # A copy, so that the memory of the others can be released.
        newest = hidden[:, -1:] + 0
        if self.eager:  # otherwise what only the drafter needs of the last layers waits too
            mx.eval(newest)
        self._hidden, self._tokens = [newest], self._tokens[-1:]


class Confidence:
    """Decides how many tokens of a finished draft are verified, and learns the ratio of accepted
    tokens to those that the drafter expected to be accepted."""

    def __init__(self) -> None:
        self._expected = self._accepted = 0.0
        self._pending = 0.0

    @property
    def scale(self) -> float:
        """Accepted tokens per expected one."""
        return (self._accepted + PRIOR) / (self._expected + PRIOR)

    def forget(self) -> None:
        """Drop the draft that waits for its verdict."""
        self._pending = 0.0

    def learn(self, accepted: int) -> None:
        """Learn how many tokens of the last draft were accepted, if its chances were read."""
        if self._pending:
            weight = max(0.0, 1 - self._pending / MEMORY)
            self._expected = self._expected * weight + self._pending
            self._accepted = self._accepted * weight + accepted
        self._pending = 0.0

    def worth(self, chances: mx.array, prices: Prices) -> int:
        """Return how many of the drafted tokens to verify, at least one.

        chances: (1, count), each token's if all before it are accepted; read where the costs say
        that it can matter."""
        count = chances.shape[1]
        wanted = least_chances(prices, count)
        if max(wanted[1:], default=0.0) < LEAST_CHANCE:
            return count
        values: Any = chances[0].tolist()
        expected = list(accumulate(values, mul))
        short = (at for at in range(1, count) if self.scale * expected[at] < wanted[at])
        end = next(short, count)
        self._pending = sum(expected[:end])
        return end


def least_chances(prices: Prices, count: int) -> Sequence[float]:
    """Return how likely each of `count` tokens must be accepted to be worth its verification.
    Costs need not be linear: a token may be the first of several for the price of one."""
    costs = prices.rounds[: count + 1]
    rises = (
        min((costs[end] - costs[at]) / (end - at) for end in range(at + 1, count + 1))
        for at in range(count)
    )
    return [rise / prices.token for rise in rises]
