"""The index against brute force."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.proposers.lookup import SuffixIndex

texts = st.lists(st.integers(0, 3), max_size=28)


def places(text: list[int], length: int) -> list[int]:
    """Ends of earlier occurrences of the last `length` tokens."""
    end = text[len(text) - length :]
    return [k for k in range(length, len(text)) if text[k - length : k] == end]


def longest(text: list[int]) -> int:
    return max((n for n in range(1, len(text)) if places(text, n)), default=0)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts, st.integers(1, 6))
def test_the_longest_match_and_its_latest_continuation_are_found(
    text: list[int], count: int
) -> None:
    index = SuffixIndex()
    for k, token in enumerate(text):
        index.extend([token])
        seen = text[: k + 1]
        match = longest(seen)
        assert index.longest_match() == match
        place = places(seen, match)[-1] if match else k + 1
        assert index.most_recent(count) == seen[place : place + count]
    assert len(index) == len(text)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(texts)
def test_the_most_frequent_continuation_is_found(text: list[int]) -> None:
    index = SuffixIndex()
    index.extend(text)
    match = longest(text) if text else 0
    found = index.most_frequent(1)
    if not match:
        assert found == []
        return
    follow = [text[place] for place in places(text, match)]
    counts = Counter(follow)
    most = max(counts.values())
    latest = next(token for token in reversed(follow) if counts[token] == most)
    assert found == [latest]


def test_a_frequent_continuation_goes_on_while_it_is_known() -> None:
    index = SuffixIndex()
    index.extend([1, 2, 3, 4, 9, 1, 2, 3, 4, 8, 1, 2, 7, 1, 2])
    assert index.most_frequent(3)[:2] == [3, 4]
    assert index.most_recent(3) == [7, 1, 2]


def test_a_monotonous_text_costs_no_more_a_token_than_any_other() -> None:
    index = SuffixIndex()
    index.extend([5] * 20_000)
    assert index.longest_match() == 19_999
    assert index.most_recent(4) == [5]
    states = len(index._next)
    assert states <= 2 * 20_000
