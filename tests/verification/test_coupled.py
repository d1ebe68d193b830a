"""Accept while equal: the emitted text is the target's own choice, whatever was drafted."""

import itertools

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.interfaces import Proposal
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.verification.rules import Coupled, LenientGreedy

VOCABULARY = 4


def laws(rows: int, seed: int, batch: int = 1) -> mx.array:
    return 2 * mx.random.normal((batch, rows, VOCABULARY), key=mx.random.key(seed))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("source", [SilentNoise(), CoupledNoise(11, VOCABULARY)])
def test_every_possible_draft_gives_a_prefix_of_the_targets_own_choices(
    seed: int, length: int, source: SilentNoise | CoupledNoise
) -> None:
    law = laws(length + 1, seed)
    noise = source.at(0, 0)
    gumbel = noise.target(length + 1)
    choices = mx.argmax(law if gumbel is None else law + gumbel, axis=-1)[0].tolist()
    for draft in itertools.product(range(VOCABULARY), repeat=length):
        verdict = Coupled().verify(law, Proposal(mx.array([draft], dtype=mx.int32)), noise)
        accepted = int(mx.sum(verdict.accepted).item())
        emitted = [*draft[:accepted], verdict.next.item()]
        assert emitted == choices[: accepted + 1]
        assert accepted == length or draft[accepted] != choices[accepted]


class BatchNoise:
    """Gumbel noise for many sequences at once, shared by both sides."""

    def __init__(self, batch: int, rows: int) -> None:
        self.gumbel = mx.random.gumbel((batch, rows, VOCABULARY), key=mx.random.key(5))

    def target(self, count: int) -> mx.array:
        return self.gumbel[:, :count]


def test_acceptance_and_law_are_those_of_the_paper() -> None:
    """P(accept) = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), and what is emitted follows p."""
    samples = 40_000
    p = np.array([0.5, 0.2, 0.2, 0.1])
    q = np.array([0.3, 0.4, 0.1, 0.2])
    noise = BatchNoise(samples, 2)
    drafted = mx.argmax(mx.log(mx.array(q)) + noise.gumbel[:, :1], axis=-1).astype(mx.int32)
    law = mx.broadcast_to(mx.log(mx.array(p)), (samples, 2, VOCABULARY))
    verdict = Coupled().verify(law, Proposal(drafted), noise)
    accepted = np.array(verdict.accepted)[:, 0]
    expected = sum(1 / sum(np.maximum(p / p[i], q / q[i])) for i in range(VOCABULARY))
    assert abs(accepted.mean() - expected) < 4 * np.sqrt(0.25 / samples)
    first = np.where(accepted, np.array(drafted)[:, 0], np.array(verdict.next))
    frequencies = np.bincount(first, minlength=VOCABULARY) / samples
    assert np.abs(frequencies - p).max() < 4 * np.sqrt(0.25 / samples)


@pytest.mark.parametrize("seed", range(20))
def test_lenience_zero_is_greedy_matching_and_more_never_accepts_less(seed: int) -> None:
    law = laws(5, seed)
    drafted = Proposal(
        mx.random.randint(0, VOCABULARY, (1, 4), key=mx.random.key(seed)).astype(mx.int32)
    )
    noise = SilentNoise()
    exact = Coupled().verify(law, drafted, noise)
    counts = []
    for delta in (0.0, 0.2, 0.5, 0.9, 1.0):
        verdict = LenientGreedy(delta).verify(law, drafted, noise)
        counts.append(int(mx.sum(verdict.accepted).item()))
        if delta == 0:
            assert verdict.accepted.tolist() == exact.accepted.tolist()
            assert verdict.next.tolist() == exact.next.tolist()
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_lenience_accepts_by_probability_relative_to_the_best() -> None:
    law = mx.log(mx.array([[[0.5, 0.3, 0.15, 0.05]] * 2]))
    for token, accepted in ((0, True), (1, True), (2, False), (3, False)):
        proposal = Proposal(mx.array([[token]], dtype=mx.int32))
        verdict = LenientGreedy(0.5).verify(law, proposal, SilentNoise())
        assert verdict.accepted.tolist() == [[accepted]]
