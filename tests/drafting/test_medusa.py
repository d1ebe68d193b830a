"""Medusa as a proposer: which hidden row it reads, and which law its tokens are drawn from."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.contracts import Proposal, Round, Scores, Verdict
from mlx_specdec.drafting.medusa import Medusa
from mlx_specdec.sampling.law import choose, log_law
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
    medusa.begin([1, 2], states(7, state))
    return medusa


def finished(drafted: int, accepted: int, scores: Scores) -> Round:
    proposal = Proposal(mx.zeros((1, drafted), dtype=mx.int32))
    verdict = Verdict(mx.arange(drafted)[None] < accepted, mx.array([0]))
    return Round(proposal, verdict, scores, accepted, 3)


def tokens(medusa: Medusa, limit: int = COUNT) -> list[int]:
    return medusa.propose([1, 2], limit, SILENT).tokens.tolist()[0]


def test_it_asks_for_the_state_that_the_head_is_given() -> None:
    assert Medusa.taps == ("final",)


def test_each_head_proposes_one_token_from_the_last_state_of_the_prompt() -> None:
    assert tokens(begun()) == [2, 3, 4]
    assert tokens(begun(), limit=2) == [2, 3]
    assert tokens(begun(), limit=9) == [2, 3, 4], "there are no more heads"


@pytest.mark.parametrize("accepted", range(COUNT + 1))
def test_after_a_round_the_row_that_predicted_the_newest_token_is_read(accepted: int) -> None:
    medusa = begun()
    medusa.observe(finished(COUNT, accepted, states(0, 1, 2, 3)))
    assert tokens(medusa, 1) == [accepted]


def test_tokens_fed_with_a_proposal_do_not_shift_its_rows() -> None:
    medusa = begun()
    medusa.observe(finished(2, 1, states(6, 6, 0, 5, 6)))
    assert tokens(medusa, 1) == [5]


def test_after_a_plain_step_its_one_row_is_read() -> None:
    medusa = begun()
    medusa.observe(finished(0, 0, states(5)))
    assert tokens(medusa, 1) == [5]


def test_a_new_text_starts_from_its_own_state() -> None:
    medusa = begun()
    medusa.observe(finished(0, 0, states(5)))
    medusa.begin([1], states(4))
    assert tokens(medusa, 1) == [4]


def test_at_temperature_0_there_are_no_rows() -> None:
    assert begun().propose([1, 2], 2, SILENT).rows is None


def test_above_temperature_0_tokens_are_drawn_from_the_rows_with_the_rounds_noise() -> None:
    settings = Sampling(temperature=0.7, top_k=5)
    noise = CoupledNoise(3, SIZE).at(0, 4)
    proposal = begun(temperature=0.7, top_k=5).propose([1, 2], COUNT, noise)
    law = log_law(Echo().logits(mx.array([[[2]]]), COUNT), settings, SIZE)
    gumbel = mx.stack([noise.draft(index) for index in range(COUNT)])
    assert mx.array_equal(proposal.rows, law)
    assert proposal.tokens.tolist() == choose(law, gumbel).tolist()


def test_penalties_count_what_earlier_heads_chose() -> None:
    class Same(Echo):
        def logits(self, state: mx.array, count: int) -> mx.array:
            row = mx.array([0.0, 0, 0, 2, 1.5, 1, 0, 0])
            return mx.broadcast_to(row, (1, count, SIZE))

    medusa = Medusa(Same(), Sampling(presence_penalty=1.2), SIZE)
    medusa.begin([1, 2], states(0))
    assert tokens(medusa) == [3, 4, 5]


def test_proposing_without_a_hidden_state_is_a_programmers_mistake() -> None:
    medusa = Medusa(Echo(), Sampling(), SIZE)
    medusa.begin([1], None)
    with pytest.raises(RuntimeError, match="hidden state"):
        tokens(medusa)
