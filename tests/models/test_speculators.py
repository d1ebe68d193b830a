"""Drafters' arithmetic against the package `speculators`, and what is easily read wrongly.

scripts/make_drafter_fixtures.py made the fixtures: each round is computed from the beginning there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints.speculators import read
from mlx_specdec.contracts import Scores
from mlx_specdec.drafting.speculator import HiddenStateDrafter
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.models.speculators import module_of
from mlx_specdec.models.speculators.speculator import Speculator
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling

from .. import speculators

FIXTURES = Path(__file__).parents[1] / "fixtures" / "drafters"
CASES = sorted(path.name for path in FIXTURES.iterdir())
LIMIT = 1e-4


class Lender:
    """A target that has nothing but an embedding and a head."""

    width, state_dtype, layers = speculators.WIDTH, mx.float32, 8

    def __init__(self, embedding: mx.array, head: mx.array | None = None) -> None:
        self.vocabulary, self.width = embedding.shape
        self._embedding = embedding
        self._head = embedding if head is None else head

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embedding[tokens]

    def head(self, states: mx.array) -> mx.array:
        return states @ self._head.T


def network_of(directory: Path, target: Lender) -> Speculator:
    files = read(directory)
    assert files is not None
    network: Speculator = module_of(files.kind).network(files, target)
    network.load(files, NumberFormat("float32"))
    return network


class Run:
    """A drafter that is shown one sequence, round after round. hidden: (tokens, taps x width)."""

    def __init__(self, network: Speculator, tokens: Sequence[int], hidden: mx.array) -> None:
        vocabulary = network._target.vocabulary
        # At a temperature there are rows; without noise the likeliest token is drawn.
        self._proposer = HiddenStateDrafter(network, Sampling(temperature=1.0), vocabulary)
        self._proposer.begin([[1]])
        self._tokens, self._hidden, self._seen = list(tokens), hidden, 0

    def draft(self, length: int, count: int) -> tuple[list[int], mx.array]:
        """`count` tokens behind the first `length`, of which all but one were seen by then."""
        taps = self._proposer.taps
        parts = mx.split(self._hidden[None, self._seen : length - 1], len(taps), axis=-1)
        shown = Scores(mx.zeros((1, 1, 1)), dict(zip(taps, parts, strict=True)))
        self._proposer.observe([self._tokens[self._seen : length - 1]], [shown])
        self._seen = length - 1
        proposal = self._proposer.propose([self._tokens[:length]], count, SilentNoise())
        assert proposal.rows is not None
        [drafted] = proposal.tokens.tolist()
        return drafted, proposal.rows[0]


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_package_speculators_round_after_round(name: str) -> None:
    reference = mx.load(str(FIXTURES / name / "reference.st"), format="safetensors")
    target = Lender(reference["embedding"], reference.get("head"))
    network = network_of(FIXTURES / name, target)
    run = Run(network, reference["tokens"].tolist(), reference["hidden"])
    known = reference["known"]
    rounds = 0
    for length, logits, expected in zip(
        reference["lengths"].tolist(), reference["logits"], reference["drafted"], strict=True
    ):
        drafted, rows = run.draft(length, logits.shape[0])
        assert drafted == expected.tolist()
        assert mx.max(mx.abs(rows[:, known] - logits)).item() <= LIMIT
        others = np.setdiff1d(np.arange(target.vocabulary), np.array(known))
        assert np.all(np.isneginf(np.array(rows)[:, others]))
        rounds += 1
    assert rounds == 9


@pytest.mark.parametrize("name", CASES)
def test_a_draft_of_fewer_tokens_is_the_beginning_of_one_of_more(name: str) -> None:
    reference = mx.load(str(FIXTURES / name / "reference.st"), format="safetensors")
    network = network_of(FIXTURES / name, Lender(reference["embedding"], reference.get("head")))
    run = Run(network, reference["tokens"].tolist(), reference["hidden"])
    for count, length, expected in zip(
        (1, 3, 2, 4, 2, 1, 3, 4, 2),
        reference["lengths"].tolist(),
        reference["drafted"].tolist(),
        strict=True,
    ):
        assert run.draft(length, count)[0] == expected[:count]
