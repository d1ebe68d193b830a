"""Known continuations are proposed, in microseconds: what followed the end of the text where it
occurred before, in the text or in documents (prompt lookup); what a grammar forces; what the client
predicts.

Source of the idea of the second: fast-forward tokens of llguidance (docs/fast_forward.md).
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import takewhile

from ..interfaces import Model, Noise, Proposal, Proposer
from ..sampling.constraint import Constraint
from .documents import DEPTH, DocumentIndex
from .drafter import Drafter, LoadedPair, Setup

BETWEEN = -1
"""Stands between a source text and the target text; never proposed, never matched across."""
GROWTH = 2
"""Tokens proposed for each token of the match: a long match is likely to go on."""
ALONE, BEFORE_OTHERS = 2, 4
"""Shortest match, in tokens, that is trusted: a shorter one is worse than a draft."""
LONGEST_CHAIN = 32
"""The number of the text's suffixes that count a new token; only monotonous texts have more, whose
shortest ones then lag a little."""


def drafter(pair: LoadedPair) -> Drafter:
    documents = pair.documents

    def make(setup: Setup) -> PromptLookup:
        trusted = BEFORE_OTHERS if setup.followed and documents is None else ALONE
        return PromptLookup(setup.ngram_min or trusted, setup.ngram_choice == "frequent", documents)

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


class PromptLookup(Continuation):
    """Proposes what followed the longest match, at most GROWTH times as long as the match.

    least: shortest match to trust, in tokens. frequent: of several continuations take the most
    frequent one instead of the latest. documents: searched as well; the text takes precedence where
    its match is as long as theirs.
    """

    def __init__(
        self, least: int = 2, frequent: bool = False, documents: DocumentIndex | None = None
    ) -> None:
        self._least = least
        self._frequent = frequent
        self._documents = documents
        self.begin([[]])

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        [self._prompt] = map(list, prompts)
        self._index = SuffixIndex()
        self._read = 0

    def continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        self._catch_up(committed)
        match = self._index.longest_match()
        tokens = self._from_documents(committed, max(match + 1, self._least), limit)
        if not tokens and match >= self._least:
            count = min(limit, GROWTH * match)
            find = self._index.most_frequent if self._frequent else self._index.most_recent
            tokens = list(takewhile(lambda token: token != BETWEEN, find(count)))
        return tokens

    def _from_documents(self, committed: Sequence[int], least: int, limit: int) -> list[int]:
        """Return what follows in the documents after a match of at least `least` tokens."""
        if self._documents is None or least > min(DEPTH, len(committed)):
            return []
        match = self._documents.find(committed)
        if match.length < least:
            return []
        return self._documents.following(match, min(limit, GROWTH * match.length))

    def _catch_up(self, committed: Sequence[int]) -> None:
        if self._read == 0 and list(committed[: len(self._prompt)]) != self._prompt:
            # The source text of an encoder-decoder model is no part of its text.
            self._index.extend([*self._prompt, BETWEEN])
        self._index.extend(committed[self._read :])
        self._read = len(committed)


class SuffixIndex:
    """A suffix automaton of a text of integers, which grows with the text in constant amortized
    time a token (Blumer et al., 1985).

    State 0 is the empty string. Each state stands for the strings that end at the same places, and
    links to the longest of their suffixes that ends elsewhere too.
    """

    def __init__(self) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._latest = [0]
        self._follow: list[dict[int, int]] = [{}]
        self._last = 0

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(token)

    def longest_match(self) -> int:
        """Return the length of the longest suffix of the text that also ends before, in tokens."""
        return self._length[self._link[self._last]] if self._text else 0

    def most_recent(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed the longest match where it came last."""
        if not self.longest_match():
            return []
        place = self._latest[self._link[self._last]]
        return self._text[place : place + count]

    def most_frequent(self, count: int) -> list[int]:
        """Return at most `count` tokens, each the most frequent one after the longest match and
        those before it; of equally frequent ones the latest."""
        state = self._link[self._last] if self._text else 0
        tokens: list[int] = []
        while state > 0 and len(tokens) < count and self._follow[state]:
            follow = self._follow[state]
            token = max(reversed(follow), key=follow.__getitem__)
            tokens.append(token)
            state = self._next[state].get(token, 0)
        return tokens

    def _append(self, token: int) -> None:
        self._count(token)
        self._text.append(token)
        state = self._new(self._length[self._last] + 1, {})
        place = self._last
        while place >= 0 and token not in self._next[place]:
            self._next[place][token] = state
            place = self._link[place]
        self._link[state] = 0 if place < 0 else self._ending(place, token)
        self._last = state

    def _count(self, token: int) -> None:
        # All of them end where the new token begins, and it follows them.
        state = self._last
        for _ in range(LONGEST_CHAIN):
            if state <= 0:
                return
            self._latest[state] = len(self._text)
            follow = self._follow[state]
            follow[token] = follow.pop(token, 0) + 1
            state = self._link[state]

    def _ending(self, place: int, token: int) -> int:
        """Return the state of exactly the longest string of `place` followed by `token`, split off
        from a state that has longer strings, too, if need be."""
        shared = self._next[place][token]
        if self._length[shared] == self._length[place] + 1:
            return shared
        copy = self._new(self._length[place] + 1, dict(self._next[shared]))
        self._link[copy] = self._link[shared]
        self._latest[copy] = self._latest[shared]
        self._follow[copy] = dict(self._follow[shared])
        while place >= 0 and self._next[place].get(token) == shared:
            self._next[place][token] = copy
            place = self._link[place]
        self._link[shared] = copy
        return copy

    def _new(self, length: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._latest.append(0)
        self._follow.append({})
        return len(self._next) - 1


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
    return Drafter(PREDICTION, lambda setup: Prediction(predicted))


class Forced(Continuation):
    """Proposes the tokens that a grammar leaves no choice about: keys, brackets, quotes.

    target: tells where a text begins. make: makes a constraint of a text that has not begun, None
    without a grammar.
    """

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


class Prediction(Continuation):
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
