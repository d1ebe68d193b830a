"""How much of a draft is worth verifying, by what its drafter says of its tokens.

A draft ends before the first token that is not worth it. What is said of a token is said before it
is drawn, and nothing that is said of later ones is looked at: where a draft ends then tells nothing
of the tokens that are dropped, and every rule stays exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import mlx.core as mx

from ..interfaces import Noise, Prices, Proposal, Proposer, Scores, no_proposal
from ..interfaces.reusable import Cached, Reusable
from ..models.drafters.network import DrafterNetwork
from ..sampling.distribution import Distribution
from ..sampling.settings import Sampling
from .draft_model import draw
from .drafter import MOST_DRAFTED, Drafter, LoadedPair, Setup

LEAST = 0.1
"""A chance to stay below which tokens are so rare that looking for them, which waits for the draft,
costs more than they do."""
WEIGHT = 8.0
"""Tokens for which a drafter is believed before anything became of its drafts."""
MEMORY = 200.0
"""Tokens after which what became of earlier ones counts for a third."""


class Confidence:
    """Ends a drafter's drafts, and learns by how much it is too sure."""

    def __init__(self) -> None:
        self._expected = self._stayed = 0.0
        self._open = 0.0

    @property
    def scale(self) -> float:
        """How many tokens stay where one was expected to."""
        return (self._stayed + WEIGHT) / (self._expected + WEIGHT)

    def forget(self) -> None:
        """No draft waits for its verdict."""
        self._open = 0.0

    def learn(self, stayed: int) -> None:
        """What became of the last draft, in tokens, if one was looked at."""
        if self._open:
            kept = max(0.0, 1 - self._open / MEMORY)
            self._expected = self._expected * kept + self._open
            self._stayed = self._stayed * kept + stayed
        self._open = 0.0

    def worth(self, chances: mx.array, prices: Prices) -> int:
        """How many of the drafted tokens to verify, at least one.

        chances: (1, count), each token's if all before it stay; read where the costs say that it
        can matter.
        """
        count = chances.shape[1]
        wanted = least_chances(prices, count)
        if max(wanted[1:], default=0.0) < LEAST:
            return count
        told: list[float] = chances[0].tolist()  # type: ignore[assignment]
        staying = list(accumulate(told, mul))
        short = (at for at in range(1, count) if self.scale * staying[at] < wanted[at])
        kept = next(short, count)
        self._open = sum(staying[:kept])
        return kept


def least_chances(prices: Prices, count: int) -> Sequence[float]:
    """How likely each of `count` tokens must be to stay to be worth its verification. Costs need
    not rise in a line: a token may be the first of several that are had for the price of one."""
    costs = prices.rounds[: count + 1]
    rises = (
        min((costs[end] - costs[at]) / (end - at) for end in range(at + 1, count + 1))
        for at in range(count)
    )
    return [rise / prices.token for rise in rises]


UNREAD = 64
"""Rows that may wait for the next guess. A prompt's are read as they come."""


def drafter(pair: LoadedPair) -> Drafter | None:
    """Of a pair whose draft reads hidden states."""
    if pair.speculator is None:
        return None
    network = pair.speculator

    def make(setup: Setup) -> HiddenStateDrafter:
        sampling = setup.options.sampling
        return HiddenStateDrafter(network, sampling, pair.vocabulary, setup.prices)

    return Drafter(
        network.kind,
        make,
        most=min(network.most, MOST_DRAFTED),
        stops=network.stops,
        nbytes=network.nbytes,
        identity=pair.draft_name or "",
    )


class HiddenStateDrafter(Proposer):
    """Proposer of one sequence.

    settings: the target's own, since p and q must be filtered alike. vocabulary: the target's size.
    prices: see Setup.
    """

    def __init__(
        self,
        network: DrafterNetwork,
        settings: Sampling,
        vocabulary: int,
        prices: Callable[[], Prices | None] | None = None,
    ) -> None:
        self.taps = network.taps
        # Of what the target does not read again it shows no hidden states.
        self.needs = (network.kind,)
        self._network = network
        self._settings = settings
        self._vocabulary = vocabulary
        self._prices = prices
        self._recalled: Cached | None = None
        self._confidence = Confidence()

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        """As contracts.Proposer says."""
        self._recalled = cached[0].get(self._network.kind)

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets the last sequence."""
        self._distributions = [
            Distribution(self._settings, self._vocabulary, prompt) for prompt in prompts
        ]
        self._reading = self._network.open()
        self._attends = False
        if self._recalled is not None:
            self._reading.recall([self._recalled])
            self._recalled = None
        self._hidden: list[mx.array] = []
        self._tokens: list[int] = []
        self._confidence.forget()

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Keeps the target's hidden states. Many of them are read at once, all but the last, whose
        next token is not known."""
        [kept], [its] = tokens, scores
        if not kept:
            return
        if its.encoded and not self._attends:
            self._attends = True
            self._reading.attend(its.encoded[0])
        self._confidence.learn(len(kept) - 1)
        self._hidden.append(mx.concatenate([its.hidden[tap] for tap in self.taps], axis=-1))
        self._tokens += kept
        if len(self._tokens) > UNREAD:
            self._read()

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """As contracts.Proposer says: what was made of the target's hidden states, each with the
        token after it. Nothing of an encoder-decoder target's: another text has another source."""
        if self._attends:
            return {}
        if len(self._tokens) > 1:
            self._read()
        return {self._network.kind: replace(self._reading.reusable(sequence), lag=1)}

    def _read(self) -> None:
        hidden = mx.concatenate(self._hidden, axis=1)
        self._reading.read(hidden[:, :-1], mx.array([self._tokens[1:]], dtype=mx.int32))
        self._reading.evaluate()
        # A copy of its own, so that the rest can be given back.
        newest = hidden[:, -1:] + 0
        mx.eval(newest)
        self._hidden, self._tokens = [newest], self._tokens[-1:]

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """Greedy at temperature 0, else drawn with the round's draft noise. Abstains where the
        target has not seen a token."""
        if self._hidden:
            following = [*self._tokens[1:], committed[0][-1]]
            hidden = mx.concatenate(self._hidden, axis=1)
            self._reading.read(hidden, mx.array([following], dtype=mx.int32))
            self._hidden, self._tokens = [], []
        length, count = self._reading.length, min(limit, self._network.most)
        if not length:
            return no_proposal()
        logits, after = self._reading.guess(count), self._reading.guess_after
        proposal = draw(self._distributions, committed, noise, count, logits, after)
        self._reading.forget(length)
        prices = None if self._prices is None else self._prices()
        if prices is None or (chances := self._reading.chances()) is None:
            return proposal
        return replace(proposal, counts=(self._confidence.worth(chances, prices),)).of(0)
