"""Proposers that continue a sequence with known tokens, in microseconds. Lookup finds the end of
the sequence earlier in it, in earlier sequences or in documents. A grammar leaves only one choice
(llguidance, docs/fast_forward.md), or the client has predicted the text."""

import functools
import sys
from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..interfaces import Model, Noise, Prices, Proposal, Proposer
from ..sampling.constraint import Constraint
from .drafter import Drafter, LoadedPair, Setup
from .text_index import BETWEEN, DEPTH, GRAMS, Match, TextIndex

GROWTH = 2
"""Number of proposed tokens for each token of the match. A long match is likely to continue."""
ALONE, BEFORE_OTHERS = 2, 4
"""Least length of a match in tokens. A shorter match is worse than another proposer's draft."""
MEMORY = 50.0
"""Number of tokens after matches of one length in which the weight of a token falls to 1 / e."""


def drafter(pair: LoadedPair) -> Drafter:
    documents, texts, accepted = pair.documents, pair.history, MatchAcceptance()

    def make(setup: Setup) -> PromptLookup:
        trusted = BEFORE_OTHERS if setup.followed and documents is None else ALONE
        return PromptLookup(
            setup.ngram_min or trusted,
            setup.ngram_choice == "frequent",
            documents,
            (lambda: None) if texts is None else functools.partial(texts.of, setup.tenant),
            accepted,
            setup.prices,
        )

    return Drafter("ngram", make)


class Continuation(Proposer):
    """A proposer of one sequence that continues it with known tokens. The proposals are one-hot."""

    @abstractmethod
    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that follow the committed ones; none to abstain. The result
        depends on the committed tokens alone."""

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return bool(self.continuation(committed[0], limit))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        return Proposal.one_hot([self.continuation(committed[0], limit)])


@dataclass(frozen=True)
class Expected:
    """A continuation, with the length of the match before each token. Proposer explains
    `chances`."""

    tokens: list[int]
    lengths: list[int]
    chances: list[float]


class MatchAcceptance:
    """The probability that the token after a match is right, by the length of the match. It is
    learned from all continuations that were found, whether they were proposed or not."""

    def __init__(self) -> None:
        # In simulations, 1 instead of 2 makes new code 4 % slower, and 3 makes edits 2 % slower.
        self._shares = [length / (length + 2) for length in [*range(9), 16, DEPTH]]

    def chance(self, length: int) -> float:
        return self._shares[self._kind(length)]

    def learn(self, length: int, right: bool) -> None:
        kind = self._kind(length)
        self._shares[kind] += (right - self._shares[kind]) / MEMORY

    def _kind(self, length: int) -> int:
        return min(length, 8) + (length >= 16) + (length >= DEPTH)


@dataclass(eq=False)
class PromptLookup(Continuation):
    """A proposer that continues the longest match, with at most GROWTH tokens per token of the
    match. Matches in the sequence, in documents and in the history compete by the number of tokens
    that they are expected to bring.

    Attributes:
        least: Least length of a match in tokens.
        frequent: Whether the most frequent of several continuations is used, not the latest.
        documents: They are searched for longer matches than the sequence has.
        history: Returns earlier sequences, or None if there are none.
        prices: See Setup. If the prices are known, a proposal is as long as it pays.
    """

    least: int = ALONE
    frequent: bool = False
    documents: TextIndex | None = None
    history: Callable[[], TextIndex | None] = lambda: None
    accepted: MatchAcceptance = field(default_factory=MatchAcceptance)
    prices: Callable[[], Prices | None] | None = None

    def __post_init__(self) -> None:
        self.begin([[]])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [self._prompt] = map(list, prompts)
        self._read = self._limit = 0
        self._expected = Expected([], [], [])

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if len(committed) > self._read or limit != self._limit:
            self._catch_up(committed)
            self._limit = limit
            found = map(self._expect, self._matches(committed[-DEPTH:], limit))
            self._expected = max(found, key=lambda expected: sum(expected.chances))
            self.chances = self._expected.chances
        tokens = self._expected.tokens
        prices = self.prices() if self.prices is not None and tokens else None
        return tokens if prices is None else tokens[: prices.worth(self._expected.chances)]

    def _matches(self, end: Sequence[int], limit: int) -> Iterator[Match]:
        yield (match := self._index.find(end, limit, self.least))
        if (history := self.history()) is not None:
            yield history.find(end, limit, self.least)
        if self.documents is not None:
            yield self.documents.find(end, limit, max(match.length + 1, self.least))

    def _expect(self, match: Match) -> Expected:
        expected, rows, chance = Expected([], [], []), match.following, 1.0
        for length in range(match.length, (1 + GROWTH) * match.length):
            at = length - match.length
            nexts = [row[at] for row in rows if at < len(row)]
            if not nexts or not (self.frequent or at < len(rows[0])):
                break
            token = max(nexts, key=nexts.count) if self.frequent else nexts[0]
            chance *= nexts.count(token) / len(nexts) * self.accepted.chance(length)
            expected.tokens.append(token)
            expected.lengths.append(length)
            expected.chances.append(chance)
            rows = [row for row in rows if row[at : at + 1] == [token]]
        return expected

    def _catch_up(self, committed: Sequence[int]) -> None:
        if self._read == 0:
            self._index = TextIndex(sys.maxsize, GRAMS if self.least > 1 else (1, *GRAMS))
            # The source of an encoder-decoder model is no part of the sequence.
            apart = list(committed[: len(self._prompt)]) != self._prompt
            self._index.add([*self._prompt, BETWEEN, *committed] if apart else committed)
        else:
            written = committed[self._read :]
            for token, length, right in zip(
                self._expected.tokens, self._expected.lengths, written, strict=False
            ):
                self.accepted.learn(length, token == right)
                if token != right:
                    break
            for token in written:
                self._index.append(token)
        self._read = len(committed)


FORCED = "forced"
PREDICTION = "prediction"
SHORTEST = 3
"""Number of tokens that are looked up in the predicted text."""


def forcing(pair: LoadedPair) -> Drafter:
    """Return the drafter that every pair has. It abstains without a constraint."""

    def make(setup: Setup) -> Forced:
        return Forced(pair.target, lambda: pair.constraint(setup.grammar))

    return Drafter(FORCED, make)


def predicting(predicted: Sequence[int]) -> Drafter:
    """Return the drafter of one request. It abstains if no token ids are predicted."""
    return Drafter(PREDICTION, lambda setup: PredictedText(predicted))


@dataclass(eq=False)
class Forced(Continuation):
    """A proposer of tokens for which a grammar leaves no choice, such as keys, brackets and quotes.

    Attributes:
        target: Returns the prefix of a prompt, after which the constraint begins.
        make: Makes the constraint of a new sequence, or returns None without a grammar."""

    target: Model
    make: Callable[[], Constraint | None]

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [prompt] = prompts
        self._constraint = self.make()
        self._read = len(self.target.prefix(prompt))

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if self._constraint is None:
            return []
        self._constraint.take(committed[self._read :])
        self._read = len(committed)
        return self._constraint.forced()[:limit]


class PredictedText(Continuation):
    """A proposer of the tokens that follow in the text that the client predicts."""

    def __init__(self, predicted: Sequence[int]) -> None:
        self._predicted = list(predicted)
        self._after: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(SHORTEST, len(self._predicted) + 1):
            self._after[tuple(self._predicted[end - SHORTEST : end])].append(end)
        self.begin([[]])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [self._prompt] = map(list, prompts)
        self._read: int | None = None
        self._place: int | None = 0
        self._furthest = 0

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if not self._predicted:
            return []
        if self._read is None:
            # The source of an encoder-decoder model is no part of the sequence.
            inside = list(committed[: len(self._prompt)]) == self._prompt
            self._read = len(self._prompt) if inside else 1
        for end in range(self._read + 1, len(committed) + 1):
            self._follow(committed, end)
        self._read = len(committed)
        return [] if self._place is None else self._predicted[self._place : self._place + limit]

    def _follow(self, committed: Sequence[int], end: int) -> None:
        """Find the place in the predicted text after `committed[end - 1]` was written."""
        place = self._place
        if place is not None and self._predicted[place : place + 1] == [committed[end - 1]]:
            self._place = place + 1
        else:
            places = self._after.get(tuple(committed[end - SHORTEST : end]), [])
            further = bisect_left(places, self._furthest)
            self._place = places[min(further, len(places) - 1)] if places else None
        self._furthest = max(self._furthest, self._place or 0)
