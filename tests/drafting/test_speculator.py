"""A drafter on hidden states as a proposer: what it reads when, and what its tokens are drawn from.

The network here writes down what happens to it.
"""

from __future__ import annotations

import itertools

import mlx.core as mx
import pytest

from mlx_specdec.interfaces import Scores
from mlx_specdec.proposers.hidden_state import UNREAD, HiddenStateDrafter
from mlx_specdec.sampling.choices import choose
from mlx_specdec.sampling.distribution import log_probabilities
from mlx_specdec.sampling.noise import CoupledNoise, IndependentNoise, SilentNoise
from mlx_specdec.sampling.settings import Sampling

SIZE = 8
SILENT = SilentNoise()


class Scribe:
    """A network whose favorite is the token after the newest; both states of a row are its token's
    number, the second one negative."""

    kind, taps, most, nbytes = "scribe", ("after.1", "after.0"), 5, 1

    def __init__(self) -> None:
        self.readings: list[Notes] = []

    def open(self) -> Notes:
        self.readings.append(Notes())
        return self.readings[-1]


class Notes:
    """rows: (token, the one after it) of all that was read. passes: how many rows came at once."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int]] = []
        self.passes: list[int] = []
        self.guessed = 0
        self.asked = 0

    @property
    def length(self) -> int:
        assert not self.guessed, "guesses are dropped before anybody asks"
        return len(self.rows)

    def read(self, hidden: mx.array, following: mx.array) -> None:
        assert not self.guessed
        assert hidden.shape == (1, following.shape[1], 2)
        assert mx.array_equal(hidden[..., 0], -hidden[..., 1]), "in the order of the taps"
        self.passes.append(following.shape[1])
        for state, after in zip(hidden[0, :, 0].tolist(), following[0].tolist(), strict=True):
            self.rows.append((int(state), after))

    def guess(self, count: int) -> mx.array:
        self.asked = count
        return self._likes(self.rows[-1][1])

    def guess_after(self, token: mx.array) -> mx.array:
        self.guessed += 1
        return self._likes(int(token.item()))

    def forget(self, length: int) -> None:
        assert length == len(self.rows)
        self.guessed = 0

    def evaluate(self) -> None:
        pass

    def _likes(self, token: int) -> mx.array:
        return 3.0 * (mx.arange(SIZE) == (token + 1) % SIZE)[None, None].astype(mx.float32)


def shown(tokens: list[int]) -> list[Scores]:
    states = mx.array([[[float(token)] for token in tokens]])
    return [Scores(mx.zeros((1, len(tokens), SIZE)), {"after.1": states, "after.0": -states})]


def begun(**settings) -> tuple[HiddenStateDrafter, Scribe]:
    network = Scribe()
    proposer = HiddenStateDrafter(network, Sampling(**settings), SIZE)
    proposer.begin([[1, 2, 3]])
    return proposer, network


def see(proposer: HiddenStateDrafter, tokens: list[int]) -> None:
    proposer.observe([tokens], shown(tokens))


def drafted(proposer: HiddenStateDrafter, committed: list[int], limit: int) -> list[int]:
    [tokens] = proposer.propose([committed], limit, SILENT).tokens.tolist()
    return tokens


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
