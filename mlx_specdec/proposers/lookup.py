"""Known continuations are proposed, in microseconds: what followed the end of the text where it
occurred before, in the text, in earlier ones or in documents (lookup); what a grammar forces; what
the client predicts.

Source of the idea of the second: fast-forward tokens of llguidance (docs/fast_forward.md)."""

import functools
import sys
from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ..interfaces import Model, Noise, Prices, Proposal, Proposer
from ..sampling.constraint import Constraint
from .documents import DocumentIndex
from .drafter import Drafter, LoadedPair, Setup
from .text_index import BETWEEN, DEPTH, GRAMS, Match, TextIndex

GROWTH = 2
"""Tokens proposed for each token of the match: a long match is likely to go on."""
ALONE, BEFORE_OTHERS = 2, 4
"""Shortest match, in tokens, that is trusted: a shorter one is worse than a draft."""
MEMORY = 50.0
"""Tokens after matches of a length in which the weight of one falls to 1/e."""


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
    """Proposer of one sequence that continues its text with known tokens. Its proposals are
    one-hot: they have no rows."""

    @abstractmethod
    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        """Return at most `limit` tokens that follow the committed ones; none to abstain. It may
        catch up with the text: the result depends on the committed tokens alone."""

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        return bool(self.continuation(committed[0], limit))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        return Proposal.one_hot([self.continuation(committed[0], limit)])


@dataclass(frozen=True)
class Expected:
    """A continuation. lengths: of the match before each token. chances: see Proposer."""

    tokens: list[int]
    lengths: list[int]
    chances: list[float]


class MatchAcceptance:
    """How likely the token after a match is right, by the length of the match: learned from all
    continuations that were looked up, proposed or not."""

    def __init__(self) -> None:
        # With 1 instead of 2, simulated texts of new code lose 4 %; with 3, edits lose 2 %.
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
    """Proposes what followed the longest match, at most GROWTH times as long as the match.

    least: shortest match to trust, in tokens. frequent: of several continuations take the most
    frequent one instead of the latest. documents: searched as well, for longer matches than the
    text has. history: returns earlier texts, None before there are any. accepted: of continuations.
    prices: see Setup; where they are known, a proposal is as long as it is worth, and those that
    are worth less than what others draft are not made.

    Text, documents and history compete by the tokens that their continuations are expected to
    bring."""

    least: int = ALONE
    frequent: bool = False
    documents: DocumentIndex | None = None
    history: Callable[[], TextIndex | None] = lambda: None
    accepted: MatchAcceptance = field(default_factory=MatchAcceptance)
    prices: Callable[[], Prices | None] | None = None

    def __post_init__(self) -> None:
        self.begin([[]])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [self._prompt] = map(list, prompts)
        self._index = TextIndex(sys.maxsize, GRAMS if self.least > 1 else (1, *GRAMS))
        self._read = self._limit = 0
        self._expected = Expected([], [], [])

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if len(committed) > self._read or limit != self._limit:
            self._catch_up(committed)
            self._limit = limit
            found = map(self._expect, self._matches(committed[-DEPTH:], limit))
            self._expected = max(found, key=lambda each: sum(each.chances))
            self.chances = self._expected.chances
        tokens = self._expected.tokens
        prices = self.prices() if self.prices is not None and tokens else None
        return tokens if prices is None else tokens[: prices.worth(self._expected.chances)]

    def _matches(self, end: Sequence[int], limit: int) -> Iterator[Match]:
        yield (match := self._index.find(end, limit, self.least))
        if (history := self.history()) is not None:
            yield history.find(end, limit, self.least)
        if self.documents is not None and self.least <= len(end) and match.length < DEPTH:
            found = self.documents.find(end)
            if found.length >= max(match.length + 1, self.least):
                yield Match(found.length, [self.documents.following(found, limit)])

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
            # The source text of an encoder-decoder model is no part of its text.
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
"""Tokens that find a place in the predicted text."""


def forcing(pair: LoadedPair) -> Drafter:
    """Return what every pair has; it abstains in texts without a constraint."""

    def make(setup: Setup) -> Forced:
        return Forced(pair.target, lambda: pair.constraint(setup.grammar))

    return Drafter(FORCED, make)


def predicting(predicted: Sequence[int]) -> Drafter:
    """Return the drafter of one request. predicted: token ids; with none it abstains."""
    return Drafter(PREDICTION, lambda setup: PredictedText(predicted))


class Forced(Continuation):
    """Proposes the tokens that a grammar leaves no choice about: keys, brackets, quotes.

    target: tells where a text begins. make: makes a constraint of a text that has not begun, None
    without a grammar."""

    def __init__(self, target: Model, make: Callable[[], Constraint | None]) -> None:
        self._target = target
        self._make = make
        self._constraint: Constraint | None = None
        self._read = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [prompt] = prompts
        self._constraint = self._make()
        self._read = len(self._target.prefix(prompt))

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        if self._constraint is None:
            return []
        self._constraint.take(committed[self._read :])
        self._read = len(committed)
        return self._constraint.forced()[:limit]


class PredictedText(Continuation):
    """Proposes what follows in the text that the client predicts."""

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
            # The prompt of an encoder-decoder model is no part of its text.
            whole = list(committed[: len(self._prompt)]) == self._prompt
            self._read = len(self._prompt) if whole else 1
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
