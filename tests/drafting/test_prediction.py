"""Drafting what a caller expects: from the beginning, and again after an edit."""

from __future__ import annotations

import pytest

from mlx_specdec.proposers.given import Prediction
from mlx_specdec.sampling.noise import SilentNoise

PROMPT = [90, 91]
EXPECTED = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 9, 9]


def proposed(*written: int, prompt: list[int] = PROMPT, prefix: list[int] = PROMPT) -> list[int]:
    proposer = Prediction(EXPECTED)
    proposer.begin([prompt])
    proposal = proposer.propose([[*prefix, *written]], 3, SilentNoise())
    return proposal.tokens.tolist()[0]


@pytest.mark.parametrize(
    ("written", "next"),
    [
        ([], [1, 2, 3]),
        ([1, 2], [3, 4, 5]),
        ([1, 2, 50], []),
        ([1, 2, 50, 4, 5], []),
        ([1, 2, 50, 4, 5, 6], [7, 8, 1]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3]),
        # The second time the same tokens come, they are taken for the second place.
        ([1, 2, 3, 4, 5, 6, 50, 1, 2, 3], [9, 9]),
        ([1, 2, 3, 50, 1, 2, 3], [4, 5, 6]),
        (EXPECTED, []),
        ([*EXPECTED, 1, 2, 3], [9, 9]),
    ],
    ids=str,
)
def test_what_comes_next_is_proposed(written: list[int], next: list[int]) -> None:
    assert proposed(*written) == next


def test_a_decoders_start_token_is_no_text() -> None:
    assert proposed(1, 2, prefix=[0]) == [3, 4, 5]


def test_it_reads_on_from_where_it_was() -> None:
    proposer, written = Prediction(EXPECTED), list(PROMPT)
    proposer.begin([PROMPT])
    for token in EXPECTED:
        assert proposer.ready([written], 1)
        written.append(token)
    assert not proposer.ready([written], 1)
    proposer.begin([PROMPT])
    assert proposer.propose([PROMPT], 2, SilentNoise()).tokens.tolist() == [[1, 2]]
