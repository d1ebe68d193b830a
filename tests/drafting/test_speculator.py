"""A drafter on hidden states as a proposer: what it reads when, and what its tokens are drawn from.

The network here writes down what happens to it.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mlx_specdec.proposers.hidden_state import UNREAD
from mlx_specdec.sampling.choices import choose
from mlx_specdec.sampling.distribution import log_probabilities
from mlx_specdec.sampling.noise import CoupledNoise, IndependentNoise
from mlx_specdec.sampling.settings import Sampling

from ..support.scribe import SILENT, SIZE, Scribe, begun, drafted, see


def test_every_state_is_read_once_with_the_token_after_it() -> None:
    proposer, network = begun()
    text = [1, 2, 3]
    see(proposer, text[:-1])
    [notes] = network.readings
    assert notes.rows == [], "the target's states wait for the next guess"
    # Uneven rounds, plain steps among them; each time the target has seen all but the newest.
    for kept in (1, 4, 1, 1, 3):
        assert drafted(proposer, text, 3) == [(text[-1] + n) % SIZE for n in (1, 2, 3)]
        assert notes.rows == list(itertools.pairwise(text))
        new = [(7 * len(text) + n) % SIZE for n in range(kept)]
        see(proposer, [text[-1], *new[:-1]])
        text += new
    assert drafted(proposer, text, 1) == [(text[-1] + 1) % SIZE]
    assert notes.passes == [2, 1, 4, 1, 1, 3]


def test_a_guess_that_nothing_came_of_can_be_made_again() -> None:
    proposer, network = begun()
    see(proposer, [1, 2])
    assert drafted(proposer, [1, 2, 3], 2) == drafted(proposer, [1, 2, 3], 2) == [4, 5]
    assert network.readings[0].passes == [2]


def test_many_states_are_read_as_they_come_but_for_the_newest() -> None:
    proposer, network = begun()
    text = [n % SIZE for n in range(3 * UNREAD)]
    [notes] = network.readings
    step = UNREAD + 1
    see(proposer, text[:step])
    assert notes.passes == [UNREAD]
    see(proposer, text[step : step + 5])
    assert notes.passes == [UNREAD]
    see(proposer, text[step + 5 : 2 * step])
    assert notes.passes == [UNREAD, step]
    assert drafted(proposer, text[: 2 * step + 1], 1)
    assert notes.rows == list(itertools.pairwise(text[: 2 * step + 1]))


def test_plain_steps_do_not_pile_states_up() -> None:
    proposer, network = begun()
    for token in range(10 * UNREAD):
        see(proposer, [token % SIZE])
        assert len(proposer._tokens) <= UNREAD
    assert len(network.readings[0].rows) >= 9 * UNREAD


def test_no_more_is_drafted_than_the_network_can() -> None:
    proposer, network = begun()
    see(proposer, [1, 2])
    assert len(drafted(proposer, [1, 2, 3], 40)) == Scribe.most
    assert network.readings[0].asked == Scribe.most


def test_nothing_is_proposed_before_a_state_was_seen_and_a_new_text_starts_anew() -> None:
    proposer, network = begun()
    assert proposer.propose([[1]], 3, SILENT).size == 0
    see(proposer, [1])
    assert drafted(proposer, [1, 4], 1) == [5]
    proposer.begin([[2]])
    assert proposer.propose([[2]], 3, SILENT).size == 0
    assert len(network.readings) == 2


def test_at_temperature_0_there_are_no_rows() -> None:
    proposer, _ = begun()
    see(proposer, [1, 2])
    assert proposer.propose([[1, 2, 3]], 2, SILENT).rows is None


@pytest.mark.parametrize("source", [CoupledNoise(3, SIZE), IndependentNoise(3, SIZE)])
def test_tokens_are_drawn_from_the_rows_with_the_rounds_noise(source) -> None:
    asked = {"temperature": 0.7, "top_k": 5, "presence_penalty": 1.2}
    proposer, network = begun(**asked)
    see(proposer, [1, 2])
    noise = source.at(0, 4)
    proposal = proposer.propose([[1, 2, 3]], 4, noise)
    [tokens] = proposal.tokens.tolist()
    newest, counts = 3, mx.zeros((SIZE,))
    for token in (1, 2, 3):
        counts[token] += 1
    for index, token in enumerate(tokens):
        logits = network.readings[0]._likes(newest)
        row = log_probabilities(logits, Sampling(**asked), SIZE, counts)
        assert mx.array_equal(proposal.rows[:, index : index + 1], row)
        assert choose(row, noise.draft(index)).item() == token
        newest = token
        counts[token] += 1
