"""A draft model as a proposer: how far ahead it may decode."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.drafting.draft_model import DraftModel
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling

from ..decoding.mocks import VOCABULARY, TableContext


class Table:
    vocabulary = VOCABULARY

    def __init__(self, max_length: int | None) -> None:
        self.max_length = max_length

    def open(self, prompt, progress=None) -> TableContext:
        return TableContext()


@pytest.mark.parametrize(
    ("max_length", "committed", "drafted"),
    [(None, 1, 8), (None, 3, 8), (64, 1, 8), (12, 8, 4), (12, 12, 0), (12, 13, 0)],
)
def test_only_its_own_positions_limit_how_far_it_drafts(
    max_length: int | None, committed: int, drafted: int
) -> None:
    proposer = DraftModel(Table(max_length), Sampling(temperature=0), VOCABULARY)
    proposer.begin([1], None)
    text = [2] * committed
    tokens = proposer.propose(text, 8, SilentNoise()).tokens
    assert tokens.shape == (1, drafted) and tokens.dtype == mx.int32
