"""The proposer with a hidden-state drafter. A draft ends before the first token that is not worth
verifying. Only chances that are known before a token is drawn decide that, which keeps every rule
exact."""

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
from .draft_model import CHUNK, draw
from .drafter import MOST_DRAFTED, Drafter, LoadedPair, Setup

LAYERS_COUNTED = (
    ", or its config.json counts layers otherwise, which benchmarks/probe.py in the repository "
    "tells"
)
UNREAD = 64
"""Number of hidden states that may wait for the next draft before the drafter reads them."""
WAITING = 4096
"""Number of hidden states of a prompt that may wait for the first draft. Those of five layers of
width 5,120 take 200 MB in half precision."""
LEAST_CHANCE = 0.1
"""Least chance of a token for which the draft is cut. Tokens with a smaller chance are rare. To
look for them, the host waits for the draft, which costs more than to verify them."""
PRIOR = 8.0
"""Prior strength in tokens: the weight of the drafter's estimate against its measured
acceptance."""
MEMORY = 200.0
"""Number of tokens after which the weight of earlier tokens falls to 1 / e."""


def drafter(pair: LoadedPair) -> Drafter | None:
    if pair.drafter_network is None:
        return None
    network = pair.drafter_network

    def make(setup: Setup) -> HiddenStateDrafter:
        settings = setup.sampling, pair.vocabulary, setup.prices, setup.eager
        return HiddenStateDrafter(network, *settings, pair.target.prefix)

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
    """A proposer of one sequence. `settings`, `vocabulary` and `prefix` are the target's. Setup
    explains `prices` and `eager`."""

    network: DrafterNetwork
    settings: Sampling
    vocabulary: int
    prices: Callable[[], Prices | None] | None = None
    eager: bool = True
    prefix: Callable[[Sequence[int]], list[int]] = list

    def __post_init__(self) -> None:
        self.taps = self.network.taps
        # The target returns no hidden states of tokens that come from its prefix cache.
        self.needs = (self.network.kind,)
        self._reading = self.network.open()
        self._attends = False
        self._hidden: list[mx.array] = []
        self._tokens: list[int] = []
        self._confidence = Confidence()

    def recall(self, lengths: Sequence[int], cached: Sequence[Mapping[str, Cached]]) -> None:
        self._reading.recall([cached[0].get(self.network.kind)])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [prompt] = prompts
        length = len(self.prefix(prompt))
        self._distributions = [
            Distribution(self.settings, self.vocabulary, prompt, prefix_length=length)
        ]

    def observe(self, tokens: Sequence[Sequence[int]], scores: Sequence[Scores]) -> None:
        """Collect the target's hidden states. If many wait, read all but the last, whose next token
        is not known."""
        [accepted], [results] = tokens, scores
        if not accepted:
            return
        if results.encoded and not self._attends:
            self._attends = True
            self._reading.attend(results.encoded[0])
        self._confidence.learn(len(accepted) - 1)
        self._hidden.append(mx.concatenate([results.hidden[tap] for tap in self.taps], axis=-1))
        self._tokens += accepted
        if len(self._tokens) > (UNREAD if self.eager else WAITING):
            self._read(self._tokens[1:])
            self._reading.evaluate()
            mx.eval(self._hidden)

    def reusable(self, sequence: int) -> Mapping[str, Reusable]:
        """See Proposer. Each position depends on a hidden state and on the token after it. With an
        encoder, nothing is reusable, since another prompt has another source."""
        if self._attends:
            return {}
        self._read(self._tokens[1:])
        return {self.network.kind: replace(self._reading.reusable(sequence), lag=1)}

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """See Proposer. Abstains if the target has not processed a token."""
        self._read([*self._tokens[1:], committed[0][-1]])
        length, count = self._reading.length, min(limit, self.network.most)
        if not length:
            return no_proposal()
        logits, after = self._reading.guess(count), self._reading.guess_after
        proposal = draw(self._distributions, committed, noise, count, logits, after)
        self._reading.rewind((length,))
        prices = None if self.prices is None else self.prices()
        if prices is None or (chances := self._reading.chances()) is None:
            return proposal
        return proposal.cut([self._confidence.worth(chances, prices)])

    def _read(self, following: Sequence[int]) -> None:
        """Read the waiting hidden states up to the last one whose next token is known, and from now
        on soon after they arrive. following: The token after each of these states."""
        if not self._hidden:
            return
        self.eager, size = True, len(following)
        hidden = mx.concatenate(self._hidden, axis=1)
        for start in range(0, size, CHUNK):
            if start > 0:
                self._reading.evaluate()
            part = following[start : start + CHUNK]
            self._reading.read(hidden[:, start : start + len(part)], mx.array([part]))
        self._tokens = self._tokens[size:]
        # A copy, so that the memory of the earlier states can be released.
        self._hidden = [hidden[:, size:] + 0] if self._tokens else []


class Confidence:
    """The choice of how many tokens of a draft are verified. It learns the ratio of accepted tokens
    to the tokens that the drafter expected to be accepted."""

    def __init__(self) -> None:
        self._expected = self._accepted = self._pending = 0.0

    @property
    def scale(self) -> float:
        """The ratio of accepted tokens to expected ones."""
        return (self._accepted + PRIOR) / (self._expected + PRIOR)

    def learn(self, accepted: int) -> None:
        """Learn how many tokens of the last draft were accepted, if its chances were read."""
        if self._pending:
            weight = max(0.0, 1 - self._pending / MEMORY)
            self._expected = self._expected * weight + self._pending
            self._accepted = self._accepted * weight + accepted
        self._pending = 0.0

    def worth(self, chances: mx.array, prices: Prices) -> int:
        """Return how many of the draft tokens to verify, at least one. `chances`, (1, count), are
        the probabilities of each token's acceptance if all tokens before it are accepted. They are
        read only if the costs can make a difference."""
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
    """Return for each of `count` tokens the least probability of acceptance at which verification
    pays. Costs need not be linear: several tokens may cost as much as one."""
    costs = prices.rounds[: count + 1]
    rises = (
        min((costs[end] - costs[at]) / (end - at) for end in range(at + 1, count + 1))
        for at in range(count)
    )
    return [rise / prices.token for rise in rises]
