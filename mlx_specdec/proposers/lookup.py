"""Where the end of a text has been before, and what came after it.

A suffix automaton that grows with the text (Blumer et al., 1985): constant time a token, amortized.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile

from ..interfaces import Noise, Proposal, Proposer
from .documents import DEPTH, DocumentIndex
from .drafter import Drafter, LoadedPair, Setup

LONGEST_CHAIN = 32
"""How many of the text's suffixes are told of each new token; more exist in monotonous texts only,
and the shortest ones are then a little behind."""


class SuffixIndex:
    """A text of integers. State 0 is the empty string; each state stands for the strings that end
    at the same places, and links to the longest of their suffixes that ends elsewhere too."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._latest = [0]
        self._follow: list[dict[int, int]] = [{}]
        self._last = 0

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self._append(token)

    def longest_match(self) -> int:
        """Length of the longest end of the text that also ends somewhere before; 0 if none does."""
        return self._length[self._link[self._last]] if self._text else 0

    def most_recent(self, count: int) -> list[int]:
        """At most `count` tokens that followed the longest match where it came last."""
        if not self.longest_match():
            return []
        place = self._latest[self._link[self._last]]
        return self._text[place : place + count]

    def most_frequent(self, count: int) -> list[int]:
        """At most `count` tokens, each the most frequent one after the longest match and those
        before it; of equally frequent ones the latest."""
        state = self._link[self._last] if self._text else 0
        tokens: list[int] = []
        while state > 0 and len(tokens) < count and self._follow[state]:
            follow = self._follow[state]
            token = max(reversed(follow), key=follow.__getitem__)
            tokens.append(token)
            state = self._next[state].get(token, 0)
        return tokens

    def _append(self, token: int) -> None:
        self._tell_suffixes(token)
        self._text.append(token)
        state = self._new(self._length[self._last] + 1, {})
        place = self._last
        while place >= 0 and token not in self._next[place]:
            self._next[place][token] = state
            place = self._link[place]
        if place < 0:
            self._link[state] = 0
        else:
            self._link[state] = self._ending(place, token)
        self._last = state

    def _tell_suffixes(self, token: int) -> None:
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
        """The state of exactly the longest string of `place` followed by `token`, split off from
        the one it shares if need be."""
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


BETWEEN = -1
"""Stands between a source text and the target text; never proposed, never matched across."""
GROWTH = 2
"""Tokens proposed for each token of the match: a long match is likely to go on."""
ALONE, BEFORE_OTHERS = 2, 4
"""Shortest match, in tokens, that is trusted: a shorter one is worse than a draft."""


def drafter(pair: LoadedPair) -> Drafter:
    """Of every pair."""
    documents = pair.documents

    def make(setup: Setup) -> PromptLookup:
        trusted = BEFORE_OTHERS if setup.followed and documents is None else ALONE
        frequent = setup.options.ngram_choice == "frequent"
        return PromptLookup(
            setup.options.ngram_min or trusted, frequent, documents, pair.vocabulary
        )

    return Drafter("ngram", make)


class PromptLookup(Proposer):
    """Proposer that searches prompt and text. Its proposals are one-hot: they have no rows.

    least: shortest match to trust, in tokens. frequent: of several continuations take the most
    frequent one instead of the latest. documents: searched as well; the text goes first where its
    match is as long as theirs. vocabulary: ids from here on are not proposed.
    """

    def __init__(
        self,
        least: int = 2,
        frequent: bool = False,
        documents: DocumentIndex | None = None,
        vocabulary: int = sys.maxsize,
    ) -> None:
        self._least = least
        self._frequent = frequent
        self._documents = documents
        self._vocabulary = vocabulary
        self._prompt: list[int] = []
        self._index = SuffixIndex()
        self._read = 0

    def begin(self, prompts: Sequence[Sequence[int]]) -> None:
        """Forgets the last sequence."""
        [self._prompt] = map(list, prompts)
        self._index = SuffixIndex()
        self._read = 0

    def ready(self, committed: Sequence[Sequence[int]], limit: int) -> bool:
        """Whether there is a match now."""
        return bool(self._continuation(committed[0], limit))

    def propose(self, committed: Sequence[Sequence[int]], limit: int, noise: Noise) -> Proposal:
        """What followed the longest match, at most GROWTH times as long as the match."""
        return Proposal.one_hot([self._continuation(committed[0], limit)])

    def _continuation(self, committed: Sequence[int], limit: int) -> list[int]:
        self._catch_up(committed)
        match = self._index.longest_match()
        tokens = self._from_documents(committed, max(match + 1, self._least), limit)
        if not tokens and match >= self._least:
            count = min(limit, GROWTH * match)
            find = self._index.most_frequent if self._frequent else self._index.most_recent
            tokens = list(takewhile(self._may_propose, find(count)))
        return tokens

    def _from_documents(self, committed: Sequence[int], least: int, limit: int) -> list[int]:
        """What follows in the documents after a match of at least `least` tokens."""
        if self._documents is None or least > min(DEPTH, len(committed)):
            return []
        match = self._documents.find(committed)
        if match.length < least:
            return []
        return self._documents.following(match, min(limit, GROWTH * match.length))

    def _catch_up(self, committed: Sequence[int]) -> None:
        if self._read == 0 and list(committed[: len(self._prompt)]) != self._prompt:
            # An encoder-decoder model's source text is no part of what it writes.
            self._index.extend([*self._prompt, BETWEEN])
        self._index.extend(committed[self._read :])
        self._read = len(committed)

    def _may_propose(self, token: int) -> bool:
        """Whether this is neither a boundary nor an id of a prompt that texts do not have."""
        return BETWEEN < token < self._vocabulary
