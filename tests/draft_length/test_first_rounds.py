"""A device compiles kernels in the first round of each kind: no cost is learned from that round."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.first_rounds import FirstRounds
from mlx_specdec.draft_length.saved import costs_of
from mlx_specdec.engine import opening
from mlx_specdec.engine.pair import Pair
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound
from mlx_specdec.options import Options

from ..support.draft_length_simulator import DRAFT, a_round
from ..support.pairs import decoder_only

OPTIONS = Options(max_tokens=200, proposer="draft", num_draft="auto")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is one that compiles kernels."""
    monkeypatch.setattr(opening, "on_cpu", lambda: False)


def test_the_first_round_of_a_kind_teaches_no_cost_and_only_once_in_a_process() -> None:
    def learned(stalled: float, first_rounds: FirstRounds | None) -> np.ndarray:
        """Return the costs that a completion teaches. stalled: seconds of each first round."""
        lengths, position = AutoLength([DRAFT], first_rounds=first_rounds), 0
        for drafted in (0, 3, 5):
            for seconds in (stalled, 1.0, 1.0, 1.0):
                lengths.on_round(a_round(drafted, drafted, seconds, position=position))
                position += drafted + 1
        lengths.learn()
        return costs_of(lengths.knowledge, DRAFT.costs)[1].mean

    first_rounds = FirstRounds()
    expected = learned(1.0, FirstRounds())
    assert (learned(9.0, first_rounds) == expected).all()
    for counted in (first_rounds, None):
        assert (learned(9.0, counted) != expected).any()


def test_each_size_of_a_batch_and_each_drafter_has_first_rounds_of_its_own() -> None:
    first_rounds = FirstRounds()
    kinds = [("", 0, 1), ("draft", 2, 1), ("draft", 3, 1), ("other", 2, 1), ("draft", 2, 4)]
    assert [first_rounds.add(*kind) for kind in kinds * 2] == [True] * 5 + [False] * 5


def test_a_pair_keeps_its_first_rounds_for_the_process(pair: Pair, compiles: None) -> None:
    first_rounds = opening.first_rounds(pair, OPTIONS)
    assert first_rounds is not None and first_rounds is opening.first_rounds(pair, OPTIONS)


def test_the_cpu_compiles_nothing_and_drops_no_round(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "on_cpu", lambda: True)
    assert opening.first_rounds(pair, OPTIONS) is None


def test_rounds_that_a_batch_shrinks_to_are_dropped_once() -> None:
    first_rounds = FirstRounds()
    lengths = AutoLength([DRAFT], first_rounds=first_rounds)
    for rows in (4, 3):
        own = SequenceRound(2, 1, 2, 1, range(9))
        lengths.on_round(RoundReport(2, (own,) * rows, RoundTimes(1.0)))
    lengths.learn()
    assert not any(first_rounds.add(DRAFT.costs, 2, rows) for rows in (4, 3))
    assert first_rounds.add(DRAFT.costs, 2, 2)
