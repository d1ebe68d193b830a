"""The index of documents against a search that looks everywhere."""

from __future__ import annotations

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.proposers.documents import DEPTH, VOTERS, DocumentIndex, backwards, order, stored

SIZE = 5
numbers = st.integers(0, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
documents = st.lists(st.lists(st.integers(0, SIZE - 1), max_size=40), max_size=4)
ends = st.lists(st.integers(0, SIZE), max_size=40)


def index_of(*texts: list[int], vocabulary: int = SIZE) -> DocumentIndex:
    tokens = backwards([np.array(text, np.int32) for text in texts], vocabulary)
    return DocumentIndex(memoryview(order(tokens)), b"head" + stored(tokens), 4)


def places(text: list[int], end: list[int]) -> list[int]:
    """Where `end` occurs in `text`: the places behind it."""
    length = len(end)
    return [k for k in range(length, len(text) + 1) if text[k - length : k] == end]


def longest(texts: list[list[int]], end: list[int]) -> int:
    lengths = range(min(len(end), DEPTH), 0, -1)
    return next((n for n in lengths if any(places(text, end[-n:]) for text in texts)), 0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(numbers, st.sampled_from([1, 2, 3, 8, 32]))
def test_places_are_in_the_order_of_what_begins_there(text: list[int], depth: int) -> None:
    places = order(np.array(text, np.int32), depth=depth).tolist()
    assert sorted(places) == list(range(len(text)))
    begins = [text[place : place + depth] for place in places]
    assert begins == sorted(begins)


def test_at_most_thirty_bytes_a_token_are_in_use() -> None:
    text = np.random.default_rng(0).integers(0, 1000, 300_000).astype(np.int32)
    tracemalloc.start()
    order(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak + text.nbytes) / len(text) <= 30


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(documents, ends, st.integers(1, 6))
def test_the_longest_end_of_a_text_and_all_its_places_are_found(
    texts: list[list[int]], end: list[int], count: int
) -> None:
    index = index_of(*texts)
    found = index.find(end)
    match = longest(texts, end)
    assert found.length == match
    if not match:
        assert found.first == found.end
        assert index.following(found, count) == []
        return
    tails = [text[k : k + count] for text in texts for k in places(text, end[-match:])]
    assert found.end - found.first == len(tails)
    following = index.following(found, count)
    if len(tails) <= VOTERS:
        votes = Counter(tail[0] for tail in tails if tail)
        most = max(votes.values(), default=0)
        assert votes[following[0]] == most if following else not votes
    assert following in tails or not following


def test_a_long_text_that_is_in_a_document_is_found_in_it_by_its_last_tokens() -> None:
    text = [int(x) for x in np.random.default_rng(1).integers(0, 50, 3000)]
    index = index_of(text[:1500], text[1500:], vocabulary=50)
    found = index.find(text[:700])
    assert (found.length, found.end - found.first) == (DEPTH, 1)
    assert index.following(found, 8) == text[700:708]
    assert len(index) == 3002


def test_a_document_ends_where_it_ends() -> None:
    index = index_of([1, 2, 3], [4, 4, 4])
    assert index.following(index.find([1, 2]), 5) == [3]
    assert index.find([1, 2, 3]).length == 3
    assert index.following(index.find([1, 2, 3]), 5) == []
    assert index.find([3, 4]).length == 1


def test_most_of_the_places_decide_how_it_goes_on() -> None:
    index = index_of([1, 2, 3, 0, 1, 2, 4, 4, 1, 2, 4, 0])
    assert index.following(index.find([1, 2]), 2)[0] == 4


def test_tokens_that_the_model_does_not_have_are_never_proposed() -> None:
    index = index_of([1, 2, 9, 1, 2, -3, 3, 3])
    assert index.find([1, 2]).length == 2
    assert index.following(index.find([1, 2]), 4) == []
    assert index.find([9]).length == 0
    assert index.find([3]).length == 1
