"""Prompt lookup: what followed the last few tokens earlier in the text or in documents is proposed.

It costs microseconds, needs no model, and abstains where nothing repeats.
Source of the idea: prompt lookup decoding (Saxena, 2023); matches here are the longest there are,
not of one fixed size.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import takewhile

from ..contracts import Noise, Proposal, Proposer
from .document_index import DEPTH, DocumentIndex
from .drafter import Asked, Brought, Drafter
from .suffix_index import SuffixIndex

BETWEEN = -1
"""Stands between a source text and the target text; never proposed, never matched across."""
GROWTH = 2
"""Tokens proposed for each token of the match: a long match is likely to go on."""
ALONE, BEFORE_OTHERS = 2, 4
"""Shortest match, in tokens, that is trusted: a shorter one is worse than a draft."""


def drafter(pair: Brought) -> Drafter:
    """Of every pair."""
    documents = pair.documents

    def make(asked: Asked, first: bool) -> PromptLookup:
        trusted = BEFORE_OTHERS if first and documents is None else ALONE
        frequent = asked.ngram_choice == "frequent"
        return PromptLookup(asked.ngram_min or trusted, frequent, documents, pair.vocabulary)

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
