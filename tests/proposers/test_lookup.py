"""Prompt lookup: what it proposes, when it abstains, and that it reads a source text."""

import random
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Prices, Setup
from mlx_specdec.proposers.lookup import PredictedText, PromptLookup
from mlx_specdec.proposers.text_index import BETWEEN, DEPTH, GRAMS, VOTERS, TextIndex

from ..support.rows import row_of

NOISE = SilentNoise()


def proposed(
    committed: list[int],
    prompt: list[int],
    limit: int = 8,
    documents: TextIndex | None = None,
    **settings,
) -> list[int]:
    lookup = PromptLookup(documents=documents)
    row = row_of(committed, 99, Options(**settings), prompt=prompt)
    proposal = lookup.propose([row], [limit], NOISE)
    assert proposal.rows is None
    assert lookup.ready([row], [limit]) == (proposal.size > 0)
    assert proposal.tokens.shape == (1, proposal.size)
    return proposal.tokens.tolist()[0]


def test_what_followed_the_match_is_proposed_and_more_after_a_longer_match() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert proposed([*prompt, 1, 2], prompt) == [3, 4, 5, 6]
    assert proposed([*prompt, 1, 2, 3], prompt) == [4, 5, 6, 7, 8, 9]
    assert proposed([*prompt, 1, 2, 3], prompt, limit=2) == [4, 5]


def test_matches_that_are_too_short_are_not_trusted() -> None:
    prompt = [1, 2, 3, 4]
    assert proposed([*prompt, 9, 2], prompt) == []
    assert proposed([*prompt, 9, 2], prompt, ngram_min=1) == [3, 4]
    assert proposed([*prompt, 1, 2], prompt, ngram_min=3) == []


def test_the_latest_continuation_is_taken_or_the_most_frequent() -> None:
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 7, 0]
    assert proposed([*text, 5, 1, 2], text, limit=1) == [7]
    assert proposed([*text, 5, 1, 2], text, limit=1, ngram_choice="frequent") == [3]


def test_a_source_text_is_searched_and_never_left_by_its_end() -> None:
    source = [10, 11, 12, 13, 1]
    assert proposed([0, 10, 11], source) == [12, 13, 1]
    assert proposed([0, 12, 13], source) == [1]


def index_of(*texts: list[int]) -> TextIndex:
    index = TextIndex(sys.maxsize)
    for text in texts:
        index.add([*text, BETWEEN])
    return index


def test_documents_are_searched_where_their_match_is_longer_or_the_only_one() -> None:
    documents = index_of([1, 2, 3, 50, 51, 52, 53], [2, 3, 60])
    prompt = [1, 2, 3, 4, 5]
    assert proposed([*prompt, 9, 9], prompt, documents=documents) == []
    assert proposed([*prompt, 50, 51], prompt, documents=documents) == [52, 53]
    assert proposed([*prompt, 1, 2, 3], prompt, documents=documents) == [4, 5, 1, 2, 3]
    longer = [7, 1, 2, 3, 7, 2, 3]
    assert proposed([9, 2, 3, 8, 1, 2, 3], [9], documents=documents, limit=2) == [50, 51]
    assert proposed(longer, [7], documents=index_of([7, 2, 3, 70, 71]), limit=2) == [70, 71]


def test_rows_of_a_batch_draft_what_is_worth_it_for_all_of_them() -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]

    def counts(rate: float, *matches: int) -> tuple[int, ...]:
        """Return the draft lengths of rows whose last tokens are as many as the prompt's first."""
        lookup = PromptLookup(setup=Setup(prices=lambda rows: Prices([1.0, 1.3, 1.8, 2.4], rate)))
        rows = [row_of([*prompt, *prompt[:size]], 99) for size in matches]
        limits = [3] * len(rows)
        proposal = lookup.propose(rows, limits, NOISE)
        assert lookup.ready(rows, limits) == (proposal.size > 0)
        return tuple(proposal.count(place) for place in range(len(rows)))

    # A match of n tokens goes on with the probability n / (n + 2), and later ones a little better.
    assert counts(1.0, 6) == (2,)
    assert counts(0.9, 6, 6, 6, 2) == (2, 2, 2, 2)
    # One row in four gains 0.75 tokens, which 0.3 plain steps of all four rows do not pay.
    assert counts(1.0, 6, 0, 0, 0) == (0, 0, 0, 0)
    assert counts(0.3, 6, 0, 0, 0) == (1, 0, 0, 0)


# The index against brute force.


texts = st.lists(st.integers(0, 3), max_size=28)


def places(text: list[int], length: int) -> list[int]:
    """Ends of earlier occurrences of the last `length` tokens."""
    end = text[len(text) - length :]
    return [k for k in range(length, len(text)) if text[k - length : k] == end]


def longest(text: list[int]) -> int:
    return max((n for n in range(1, len(text)) if places(text, n)), default=0)


def index_grown(text: list[int], at: int) -> TextIndex:
    """An index of a text of which `at` tokens come at once, and the others one by one."""
    index = TextIndex(sys.maxsize, (1, *GRAMS))
    index.add(text[:at])
    for token in text[at:]:
        index.append(token)
    return index


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, st.integers(0, 28), st.integers(1, 6))
def test_the_longest_match_and_its_latest_continuations_are_found(
    text: list[int], at: int, count: int
) -> None:
    found = index_grown(text, at).find(text[-DEPTH:], count, 1)
    match = longest(text) if text else 0
    assert found.length == match
    ends = places(text, match) if match else []
    following = [text[place : place + count] for place in reversed(ends)]
    assert found.following == following[: len(found.following)]
    assert len(found.following) >= min(len(following), 8 if match > 1 else VOTERS)


def test_a_monotonous_text_costs_no_more_a_token_than_any_other() -> None:
    index = index_grown([5] * 20_000, 100)
    found = index.find([5] * DEPTH, 4, 2)
    assert (found.length, len(found.following)) == (DEPTH, VOTERS)
    assert found.following[:5] == [[5], [5] * 2, [5] * 3, [5] * 4, [5] * 4]
    assert index.nbytes < 80 * 20_000


def test_a_full_index_finds_the_newest_texts_and_never_a_mixture_of_two() -> None:
    draws = random.Random(1)
    index = TextIndex(200)
    nbytes = index.nbytes
    written: list[list[int]] = []
    for _ in range(30):
        written.append([draws.randrange(9) for _ in range(draws.randrange(3, 60))])
        index.add([*written[-1], BETWEEN])
        for text in written:
            for end in range(2, len(text)):
                match = index.find(text[max(0, end - DEPTH) : end], 4, 2)
                tail = text[max(0, end - DEPTH) : end][-match.length :]
                for following in match.following:
                    around = bytes([*tail, *following])
                    assert any(around in bytes(earlier) for earlier in written)
        newest = written[-1][-DEPTH:]
        assert index.find(newest[:-1], 1, 2).length >= len(newest) - 1 or len(newest) < 3
    assert index.nbytes == nbytes


# Drafting what a caller expects: from the beginning, and again after an edit.


PROMPT = [90, 91]
EXPECTED = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9, 9]


def expecting() -> Any:
    return row_of(PROMPT, 99, prediction=EXPECTED)


@pytest.mark.parametrize(
    ("written", "next"),
    [
        ([], [1, 2, 3]),
        ([1, 2], [3, 4, 5]),
        ([1, 2, 50], []),
        ([1, 2, 50, 4, 5], []),
        ([1, 2, 50, 4, 5, 6], [7, 8, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3]),
        # Of several places, the longest match decides, and then the last place.
        ([50, 4, 5, 6, 7, 8, 1, 2, 3], [9, 9]),
        ([1, 2, 3, 4, 5, 6, 50, 1, 2, 3], [9, 9]),
        (EXPECTED, []),
        ([*EXPECTED, 1, 2, 3], [9, 9]),
    ],
    ids=str,
)
def test_what_comes_next_is_proposed(written: list[int], next: list[int]) -> None:
    for prefix in (PROMPT, [0]):
        row = expecting()
        row.committed, row.position = [*prefix, *written], len(written)
        assert PredictedText().propose([row], [3], NOISE).tokens.tolist() == [next]


def test_it_reads_on_from_where_it_was() -> None:
    proposer, row = PredictedText(), expecting()
    for token in EXPECTED:
        assert proposer.ready([row], [1])
        row.committed.append(token)
        row.position += 1
    assert not proposer.ready([row], [1])
    both = proposer.propose([row, expecting()], [2, 2], NOISE)
    assert both.counts == (0, 2) and both.of(1).tokens.tolist() == [[1, 2]]


@pytest.mark.parametrize("proposer", [PromptLookup(), PredictedText()])
def test_asking_whether_anything_would_be_drafted_changes_no_proposal(proposer: Any) -> None:
    draws = random.Random(0)
    text = [draws.randrange(1, 5) for _ in range(80)]
    often, never = (row_of(text[:5], 9, prediction=[1, 2, 3, 4, 1, 2, 3, 5]) for _ in range(2))
    for end in range(5, len(text), 3):
        for seen in range(end - 2, end + 1):
            often.committed = text[: max(seen, 5)]
            ready = proposer.ready([often], [4])
        never.committed = text[:end]
        both = [proposer.propose([row], [4], NOISE).tokens.tolist() for row in (often, never)]
        assert both[0] == both[1]
        assert ready == bool(both[0][0])
