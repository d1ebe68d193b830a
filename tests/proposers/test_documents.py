"""The index of documents against a search that looks everywhere."""

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec import process as user_cache
from mlx_specdec.proposers import documents as document_cache
from mlx_specdec.proposers.documents import (
    VOTERS,
    DocumentIndex,
    IndexKey,
    backwards,
    order,
    stored,
)
from mlx_specdec.proposers.text_index import DEPTH, Match

SIZE = 5
numbers = st.integers(0, 4).flatmap(lambda most: st.lists(st.integers(0, most), max_size=60))
documents = st.lists(st.lists(st.integers(0, SIZE - 1), max_size=40), max_size=4)
ends = st.lists(st.integers(0, SIZE), max_size=40)


def index_of(*texts: list[int], vocabulary: int = SIZE) -> DocumentIndex:
    tokens = backwards([np.array(text, np.int32) for text in texts], vocabulary)
    return DocumentIndex(memoryview(order(tokens)), stored(tokens))


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


@pytest.mark.slow
@settings(max_examples=400, deadline=None, derandomize=True)
@given(documents, ends, st.integers(1, 6))
def test_the_longest_end_of_a_text_and_all_its_places_are_found(
    texts: list[list[int]], end: list[int], count: int
) -> None:
    index = index_of(*texts)
    match = longest(texts, end)
    assert index.find(end[-DEPTH:], count, match + 1) == Match(0, [])
    found = index.find(end[-DEPTH:], count, match)
    assert found.length == match
    if not match:
        assert found.following == []
        return
    tails = [text[k : k + count] for text in texts for k in places(text, end[-match:])]
    [following] = found.following
    if len(tails) <= VOTERS:
        votes = Counter(tail[0] for tail in tails if tail)
        most = max(votes.values(), default=0)
        assert votes[following[0]] == most if following else not votes
    assert following in tails or not following


def test_a_long_text_that_is_in_a_document_is_found_in_it_by_its_last_tokens() -> None:
    text = [int(x) for x in np.random.default_rng(1).integers(0, 50, 3000)]
    index = index_of(text[:1500], text[1500:], vocabulary=50)
    assert index.find(text[700 - DEPTH : 700], 8, 1) == Match(DEPTH, [text[700:708]])


def test_a_document_ends_where_it_ends() -> None:
    index = index_of([1, 2, 3], [4, 4, 4])
    assert index.find([1, 2], 5, 1) == Match(2, [[3]])
    assert index.find([1, 2, 3], 5, 1) == Match(3, [[]])
    assert index.find([3, 4], 5, 1).length == 1


# Indexes on disk: found again, never half there, built again when broken, never in the way.


KEY = IndexKey("d0", "e1", 50)
TEXT = [int(x) for x in np.random.default_rng(3).integers(0, 50, 500)]


def built(key: IndexKey = KEY) -> DocumentIndex:
    return document_cache.build(key, [np.array(TEXT, np.int32)])


def works(index: DocumentIndex | None) -> bool:
    assert index is not None
    return index.find(TEXT[90 - DEPTH : 90], 6, 1).following == [TEXT[90:96]]


@pytest.fixture
def file() -> Path:
    """The only file, of an index that was built."""
    built()
    (only,) = user_cache.directory("documents").iterdir()
    return only


def test_an_index_is_found_again_by_the_same_key_alone(file: Path) -> None:
    assert works(document_cache.read(KEY))
    assert document_cache.read(replace(KEY, documents="d1")) is None
    assert document_cache.read(replace(KEY, tokenizer="e2")) is None
    assert document_cache.read(replace(KEY, vocabulary=51)) is None


def test_an_index_that_cannot_be_written_stays_in_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "file"))
    assert works(built())

    def full(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv(user_cache.PLACE, str(tmp_path / "full"))
    monkeypatch.setattr(os, "replace", full)
    assert works(built())
    assert list(user_cache.directory("documents").iterdir()) == []


def test_what_was_used_longest_ago_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [replace(KEY, documents=name) for name in "abc"]
    for age, key in enumerate(keys):
        built(key)
        os.utime(key.file, (1000 + age, 1000 + age))
    assert works(document_cache.read(keys[0]))  # and is the newest by that
    total = sum(file.stat().st_size for file in user_cache.directory("documents").iterdir())
    monkeypatch.setattr(document_cache, "MOST_BYTES", total)
    built()
    there = [key.file.exists() for key in (*keys, KEY)]
    assert there == [True, False, True, True]
