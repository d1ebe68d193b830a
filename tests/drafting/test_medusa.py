"""Medusa as a proposer: which hidden row it reads, and what its tokens are drawn from."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.interfaces import Scores
from mlx_specdec.proposers.medusa import Medusa
from mlx_specdec.sampling.choices import choose
from mlx_specdec.sampling.distribution import log_probabilities
from mlx_specdec.sampling.noise import CoupledNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling

SIZE = 8
COUNT = 3
SILENT = SilentNoise()


class Echo:
    """Head i thinks that the token is the state's number plus i."""

    count = COUNT

    def logits(self, state: mx.array, count: int) -> mx.array:
        assert state.shape == (1, 1, 1)
        best = (state[0, 0, 0].astype(mx.int32) + mx.arange(count)) % SIZE
        return 3.0 * (mx.arange(SIZE) == best[:, None])[None].astype(mx.float32)


def states(*numbers: int) -> Scores:
    return Scores(mx.zeros((1, len(numbers), SIZE)), {"final": mx.array([[[n] for n in numbers]])})


def begun(state: int = 2, **settings) -> Medusa:
    medusa = Medusa(Echo(), Sampling(**settings), SIZE)
    medusa.begin([[1, 2]])
    medusa.observe([[1, 2]], [states(7, state)])
    return medusa


def tokens(medusa: Medusa, limit: int = COUNT) -> list[int]:
    return medusa.propose([[1, 2]], limit, SILENT).tokens.tolist()[0]


def test_it_asks_for_the_state_that_the_head_is_given() -> None:
    assert Medusa.taps == ("final",)


def test_each_head_proposes_one_token_from_the_last_state_of_the_prompt() -> None:
    assert tokens(begun()) == [2, 3, 4]
    assert tokens(begun(), limit=2) == [2, 3]
    assert tokens(begun(), limit=9) == [2, 3, 4], "there are no more heads"


@pytest.mark.parametrize("accepted", range(COUNT + 1))
def test_after_a_round_the_row_that_predicted_the_newest_token_is_read(accepted: int) -> None:
    medusa = begun()
    medusa.observe([[2] * (accepted + 1)], [states(*range(accepted + 1))])
    assert tokens(medusa, 1) == [accepted]


def test_a_new_text_starts_from_its_own_state() -> None:
    medusa = begun()
    medusa.begin([[1]])
    assert medusa.propose([[1]], 1, SILENT).size == 0
    medusa.observe([[1]], [states(4)])
    assert tokens(medusa, 1) == [4]


def test_at_temperature_0_there_are_no_rows() -> None:
    assert begun().propose([[1, 2]], 2, SILENT).rows is None


def test_above_temperature_0_tokens_are_drawn_from_the_rows_with_the_rounds_noise() -> None:
    settings = Sampling(temperature=0.7, top_k=5)
    noise = CoupledNoise(3, SIZE).at(0, 4)
    proposal = begun(temperature=0.7, top_k=5).propose([[1, 2]], COUNT, noise)
    log_p = log_probabilities(Echo().logits(mx.array([[[2]]]), COUNT), settings, SIZE)
    gumbel = mx.concatenate([noise.draft(index) for index in range(COUNT)], axis=1)
    assert mx.array_equal(proposal.rows, log_p)
    assert proposal.tokens.tolist() == choose(log_p, gumbel).tolist()


def test_penalties_count_what_earlier_heads_chose() -> None:
    class Same(Echo):
        def logits(self, state: mx.array, count: int) -> mx.array:
            row = mx.array([0.0, 0, 0, 2, 1.5, 1, 0, 0])
            return mx.broadcast_to(row, (1, count, SIZE))

    medusa = Medusa(Same(), Sampling(presence_penalty=1.2), SIZE)
    medusa.begin([[1, 2]])
    medusa.observe([[1]], [states(0)])
    assert tokens(medusa) == [3, 4, 5]


def test_nothing_is_proposed_before_a_hidden_state_was_seen() -> None:
    medusa = Medusa(Echo(), Sampling(), SIZE)
    medusa.begin([[1]])
    assert medusa.propose([[1]], COUNT, SILENT).size == 0
    assert medusa.ready([[1]], COUNT), "it will have seen one after the next step"
