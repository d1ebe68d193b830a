"""Prompt lookup: what it proposes, when it abstains, and that it reads a source text."""

from __future__ import annotations

import numpy as np

from mlx_specdec.proposers.documents import DocumentIndex, backwards, order, stored
from mlx_specdec.proposers.lookup import PromptLookup
from mlx_specdec.sampling.noise import SilentNoise

NOISE = SilentNoise()


def proposed(committed: list[int], prompt: list[int], limit: int = 8, **settings) -> list[int]:
    lookup = PromptLookup(**settings)
    lookup.begin([prompt])
    proposal = lookup.propose([committed], limit, NOISE)
    assert proposal.rows is None
    assert lookup.ready([committed], limit) == (proposal.size > 0)
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
    assert proposed([*prompt, 9, 2], prompt, least=1) == [3, 4]
    assert proposed([*prompt, 1, 2], prompt, least=3) == []


def test_the_latest_continuation_is_taken_or_the_most_frequent() -> None:
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 7, 0]
    assert proposed([*text, 5, 1, 2], text, limit=1) == [7]
    assert proposed([*text, 5, 1, 2], text, limit=1, frequent=True) == [3]


def test_a_source_text_is_searched_and_never_left_by_its_end() -> None:
    source = [10, 11, 12, 13, 1]
    assert proposed([0, 10, 11], source) == [12, 13, 1]
    assert proposed([0, 12, 13], source) == [1]


def test_a_text_is_read_once_and_a_new_one_begins_from_nothing() -> None:
    lookup = PromptLookup()
    lookup.begin([[1, 2, 3]])
    committed = [1, 2, 3]
    for token in (1, 2):
        committed.append(token)
        proposal = lookup.propose([committed], 4, NOISE)
    assert proposal.tokens.tolist() == [[3, 1, 2]]
    lookup.begin([[5, 6]])
    assert lookup.propose([[5, 6, 1, 2]], 4, NOISE).size == 0


def index_of(*texts: list[int]) -> DocumentIndex:
    tokens = backwards([np.array(text, np.int32) for text in texts], 100)
    return DocumentIndex(order(tokens).data, stored(tokens))


def test_documents_are_searched_where_their_match_is_longer_or_the_only_one() -> None:
    documents = index_of([1, 2, 3, 50, 51, 52, 53], [2, 3, 60])
    prompt = [1, 2, 3, 4, 5]
    assert proposed([*prompt, 9, 9], prompt, documents=documents) == []
    assert proposed([*prompt, 50, 51], prompt, documents=documents) == [52, 53]
    assert proposed([*prompt, 1, 2, 3], prompt, documents=documents) == [4, 5, 1, 2, 3]
    longer = [7, 1, 2, 3, 7, 2, 3]
    assert proposed([9, 2, 3, 8, 1, 2, 3], [9], documents=documents, limit=2) == [50, 51]
    assert proposed(longer, [7], documents=index_of([7, 2, 3, 70, 71]), limit=2) == [70, 71]


def test_a_match_in_documents_has_to_be_as_long_as_any_other() -> None:
    documents = index_of([5, 6, 7])
    assert proposed([1, 6], [1], documents=documents) == []
    assert proposed([1, 6], [1], documents=documents, least=1) == [7]
    assert proposed([1, 5, 6], [1], documents=documents, least=3) == []
    assert proposed([5, 6], [5], documents=documents, least=2) == [7], "all of the text is found"
    assert proposed([5, 6], [5], documents=documents, least=3) == []


def test_the_text_is_taken_where_a_document_ends_with_the_match() -> None:
    documents = index_of([9, 1, 2])
    assert proposed([1, 2, 3, 9, 1, 2], [1], documents=documents, limit=2) == [3, 9]


def test_a_source_text_is_followed_by_documents_as_well() -> None:
    assert proposed([0, 10, 11], [8, 9, 1], documents=index_of([10, 11, 12])) == [12]


def test_ids_that_texts_do_not_have_are_not_proposed() -> None:
    lookup = PromptLookup(vocabulary=50)
    text = [1, 2, 60, 3, 4, 5, 1, 2]
    lookup.begin([text])
    assert not lookup.ready([text], 4)
    text = [1, 2, 49, 60, 4, 5, 1, 2]
    lookup.begin([text])
    assert lookup.propose([text], 4, SilentNoise()).tokens.tolist() == [[49]]
