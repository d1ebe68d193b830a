"""A network that reads the target's hidden states proposes; others call it a speculator.

Only what it makes of the target's hidden states stays in its memory. What it makes while guessing
is dropped after every round, and the tokens that stayed are read again with the target's states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import mlx.core as mx

from ..contracts import Noise, Proposal, Proposer, Scores, no_proposal
from ..kept import Kept, Memory
from ..sampling.distribution import Distribution
from ..sampling.settings import Sampling
from .chain import draw
from .confidence import Confidence
from .drafter import MOST_DRAFTED, Brought, Drafter

MISSING = (
    "there is no such drafter to propose: name the directory of one that was made for this target "
    "with draft-model"
)
UNREAD = 64
"""Rows that may wait for the next guess. A prompt's are read as they come."""


def drafter(pair: Brought) -> Drafter | None:
    """Of a pair whose draft reads hidden states."""
    if pair.speculator is None:
        return None
    network = pair.speculator
    return Drafter(
        network.kind,
        lambda asked, first: HiddenStateDrafter(network, asked.sampling, pair.vocabulary),
        most=min(network.most, MOST_DRAFTED),
        stops=network.stops,
        nbytes=network.nbytes,
        identity=pair.draft_name or "",
    )


class Reading(Protocol):
    """One sequence in a network."""

    @property
    def length(self) -> int:
        """How many of the target's rows were read."""
        ...

    def attend(self, encoded: mx.array) -> None:
        """The target's encoder has made this of the source, (1, n, width). Called before anything
        is read, where the target has an encoder."""
        ...

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """See the target's hidden states side by side, (1, m, taps x width), of tokens that are
        committed, and for each of them the committed token after it, (1, m) int32. Lazy."""
        ...

    def guess(self, count: int) -> mx.array:
        """Begin `count` tokens behind the newest that was read: logits (1, 1, the target's
        vocabulary) of the first."""
        ...

    def guess_after(self, token: mx.array) -> mx.array:
        """Those of the next one, behind the guessed `token`, (1, 1) int32."""
        ...

    def chances(self) -> mx.array | None:
        """How likely each of the tokens guessed so far is to stay, if all before it do, (1, count)
        float32; None where the network does not tell. A token's own says nothing of which one was
        drawn."""
        ...

    def forget(self, length: int) -> None:
        """Drop all rows but the first `length`."""
        ...

    def evaluate(self) -> None:
        """Compute what was read, and wait for it."""
        ...

    def memory(self, sequence: int) -> Memory:
        """As contracts.Context says; the sequence is 0."""
        ...

    def recall(self, kept: Sequence[Kept | None]) -> None:
        """Begin with what another sequence has kept; nothing was read yet."""
        ...


class Network(Protocol):
    """What a target's hidden states are read by."""

    kind: str
    taps: tuple[str, ...]

    @property
    def stops(self) -> bool:
        """Whether it tells how likely what it drafts is to stay."""
        ...

    @property
    def most(self) -> int:
        """How many tokens a round may draft."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of its own weights in bytes."""
        ...

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        ...


class HiddenStateDrafter(Proposer):
    """Proposer of one sequence.

    settings: the target's own, since p and q must be filtered alike. vocabulary: the target's size.
    """

    def __init__(self, network: Network, settings: Sampling, vocabulary: int) -> None:
        self.taps = network.taps
        # Of what the target does not read again it shows no hidden states.
        self.needs = (network.kind,)
        self._network = network
        self._settings = settings
        self._vocabulary = vocabulary
        self._recalled: Kept | None = None
        self._confidence = Confidence()

    def recall(self, lengths: Sequence[int], kept: Sequence[Mapping[str, Kept]]) -> None:
        """As contracts.Proposer says."""
        self._recalled = kept[0].get(self._network.kind)

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

    def memories(self, sequence: int) -> Mapping[str, Memory]:
        """As contracts.Proposer says: what was made of the target's hidden states, each with the
        token after it. Nothing of an encoder-decoder target's: another text has another source."""
        if self._attends:
            return {}
        if len(self._tokens) > 1:
            self._read()
        return {self._network.kind: replace(self._reading.memory(sequence), lag=1)}

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
        prices = None if self.prices is None else self.prices()
        if prices is None or (chances := self._reading.chances()) is None:
            return proposal
        return replace(proposal, counts=(self._confidence.worth(chances, prices),)).of(0)
