"""Proposers that continue a sequence with known tokens, in microseconds. Lookup finds the end of
the sequence earlier in it, in earlier sequences or in documents. A grammar leaves only one choice
(llguidance, docs/fast_forward.md), or the client has predicted the text."""

import sys
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ..core.proposer import GroupProposer, Setup
from ..core.row import Row
from ..types import Noise, Proposal
from .text_index import BETWEEN, DEPTH, GRAMS, History, Match, TextIndex

GROWTH = 2
"""Number of proposed tokens for each token of the match. A long match is likely to continue."""
ALONE, BEFORE_OTHERS = 2, 4
"""Least length of a match in tokens. A shorter match is worse than another proposer's draft."""
MATCH_MEMORY = 50.0
"""Number of tokens after matches of one length in which the weight of a token in the rate of this
length falls to 1 / e."""


class Continuation(GroupProposer):
    """A proposer that continues each row with known tokens. The proposals are one-hot."""

    @abstractmethod
    def continuation(self, row: Row, limit: int) -> list[int]:
        """Return at most `limit` tokens that follow the committed ones; none to abstain. The result
        depends on the row alone."""

    def continuations(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        """Return the continuation of each row."""
        limited = zip(rows, limits, strict=True)
        return [self.continuation(row, limit) if limit else [] for row, limit in limited]

    def ready(self, rows: Sequence[Row], limits: Sequence[int]) -> bool:
        return any(self.continuations(rows, limits))

    def propose(self, rows: Sequence[Row], limits: Sequence[int], noise: Noise) -> Proposal:
        return Proposal.one_hot(self.continuations(rows, limits))


def match_rates() -> list[float]:
    """Return the rates at which the token after a match is right, by `place_of` of the match's
    length. They are learned from all continuations that were found, whether they were proposed or
    not."""
    # In simulations, 1 instead of 2 makes new code 4 % slower, and 3 makes edits 2 % slower.
    return [length / (length + 2) for length in [*range(9), 16, DEPTH]]


def place_of(length: int) -> int:
    """Return the place of a match's length in `match_rates`."""
    return min(length, 8) + (length >= 16) + (length >= DEPTH)


@dataclass(eq=False)
class Found:
    """The state of one row in lookup.

    Attributes:
        index: The row's own tokens.
        length: The length of the match, which each token makes one token longer.
        tokens: The continuation after the `indexed` tokens, of at most `limit` tokens.
        chances: Entry i is the estimated probability that tokens 0 .. i are all accepted."""

    index: TextIndex
    indexed: int = 0
    limit: int = 0
    length: int = 0
    tokens: Sequence[int] = ()
    chances: Sequence[float] = ()


@dataclass(eq=False)
class PromptLookup(Continuation):
    """A proposer that continues the longest match, with at most GROWTH tokens per token of the
    match. Matches in the row, in documents and in the history compete by the number of tokens that
    they are expected to bring.

    Attributes:
        documents: They are searched for longer matches than the row has.
        history: Earlier sequences, or None.
        setup: If it has the costs of rounds, a proposal is as long as it pays for all rows
            together."""

    documents: TextIndex | None = None
    history: History | None = None
    rates: list[float] = field(default_factory=match_rates)
    setup: Setup = field(default_factory=Setup)

    def continuations(self, rows: Sequence[Row], limits: Sequence[int]) -> list[list[int]]:
        found = super().continuations(rows, limits)
        prices = self.setup.prices(len(rows)) if any(found) else None
        if prices is None:
            return found
        known = (self._of(row).chances for row, ids in zip(rows, found, strict=True) if ids)
        columns = zip_longest(*known, fillvalue=0.0)
        most = prices.most([sum(column) / len(rows) for column in columns])
        return [ids[:most] for ids in found]

    def continuation(self, row: Row, limit: int) -> list[int]:
        found, committed = self._of(row), row.committed
        if len(committed) > found.indexed or limit != found.limit:
            self._catch_up(row, found)
            found.limit = limit
            frequent = row.options.ngram_choice == "frequent"
            matches = self._matches(row, found, committed[-DEPTH:], limit)
            expected = [self._expected(match, frequent) for match in matches]
            best = max(expected, key=lambda one: sum(one[2]))
            found.length, found.tokens, found.chances = best
        return list(found.tokens)

    def _of(self, row: Row) -> Found:
        """Return the state of a row."""
        if "ngram" not in row.state:
            grams = GRAMS if self._least(row) > 1 else (1, *GRAMS)
            row.state["ngram"] = Found(TextIndex(sys.maxsize, grams))
        found: Found = row.state["ngram"]
        return found

    def _least(self, row: Row) -> int:
        before = self.setup.followed and self.documents is None
        return row.options.ngram_min or (BEFORE_OTHERS if before else ALONE)

    def _matches(self, row: Row, found: Found, end: Sequence[int], limit: int) -> Iterator[Match]:
        least = self._least(row)
        yield (match := found.index.find(end, limit, least))
        history = None if self.history is None else self.history.of(row.request.tenant)
        if history is not None:
            yield history.find(end, limit, least)
        if self.documents is not None:
            yield self.documents.find(end, limit, max(match.length + 1, least))

    def _expected(self, match: Match, frequent: bool) -> tuple[int, list[int], list[float]]:
        """Return the length of a match, its continuation and `Found.chances`. frequent: Whether the
        most frequent of several continuations is used, not the latest."""
        tokens, chances, rows, chance = [], [], match.following, 1.0
        for at in range(GROWTH * match.length):
            nexts = [row[at] for row in rows if at < len(row)]
            if not nexts or not (frequent or at < len(rows[0])):
                break
            token = max(nexts, key=nexts.count) if frequent else nexts[0]
            chance *= nexts.count(token) / len(nexts) * self.rates[place_of(match.length + at)]
            tokens.append(token)
            chances.append(chance)
            rows = [row for row in rows if row[at : at + 1] == [token]]
        return match.length, tokens, chances

    def learn(self, length: int, right: bool) -> None:
        """Count whether the token after a match was right. length: The length of the match."""
        place = place_of(length)
        self.rates[place] += (right - self.rates[place]) / MATCH_MEMORY

    def _catch_up(self, row: Row, found: Found) -> None:
        committed = row.committed
        if found.indexed == 0:
            # The source of an encoder-decoder model is no part of the sequence.
            prompt = list(row.prompt)
            apart = list(committed[: len(prompt)]) != prompt
            found.index.add([*prompt, BETWEEN, *committed] if apart else committed)
        else:
            written = committed[found.indexed :]
            for at, (token, right) in enumerate(zip(found.tokens, written, strict=False)):
                self.learn(found.length + at, token == right)
                if token != right:
                    break
            for token in written:
                found.index.append(token)
        found.indexed = len(committed)


FORCED = "forced"
PREDICTION = "prediction"
SHORTEST = 3
"""Number of tokens that are looked up in the predicted text."""


class Forced(Continuation):
    """A proposer of tokens for which a grammar leaves no choice, such as keys, brackets and
    quotes."""

    def continuation(self, row: Row, limit: int) -> list[int]:
        constraint = row.distribution.constraint
        return [] if constraint is None else constraint.forced()[:limit]


class PredictedText(Continuation):
    """A proposer of the tokens that follow in the text that the client predicts."""

    def continuation(self, row: Row, limit: int) -> list[int]:
        if not row.prediction:
            return []
        written = row.committed[len(row.committed) - row.position :]
        if written == row.prediction[: len(written)]:
            return row.prediction[len(written) :][:limit]
        if PREDICTION not in row.state:
            row.state[PREDICTION] = TextIndex(sys.maxsize, (SHORTEST,))
            row.state[PREDICTION].add([*row.prediction, BETWEEN])
        match: Match = row.state[PREDICTION].find(written[-DEPTH:], limit, SHORTEST)
        return next(iter(match.following), [])
