"""Figures stop at the last emitted token, and times are scaled from the timed rounds."""

import pytest

from mlx_specdec.decoding.statistics import Recorder, Statistics
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound

from ..support.mocks import Guesser, TableContext, decoding, run


def summary(recorder: Recorder, decoding_seconds: float = 10.0) -> Statistics:
    return recorder.summary(load=1, prompt=2, decoding=decoding_seconds)


def add(
    recorder: Recorder,
    drafted: int,
    accepted: int,
    emitted: int,
    times: RoundTimes,
    ended: bool = False,
) -> None:
    """A round of one sequence."""
    sequence = SequenceRound(drafted, accepted, emitted, position=0, committed=[], ended=ended)
    recorder.on_round(RoundReport(drafted, (sequence,), times))


@pytest.mark.parametrize("room", range(1, 9))
def test_nothing_behind_the_last_emitted_token_is_counted(room: int) -> None:
    context = TableContext(3)
    expected = context.greedy([1], 30)
    recorder = Recorder()
    guesser = Guesser(lambda position, limit: expected[position : position + limit])
    eos = expected[room - 1]
    end = expected.index(eos) + 1
    tokens, _, _ = run(decoding(context, guesser, count=5, room=30, eos=[eos], recorder=recorder))
    stats = summary(recorder)
    assert len(tokens) == end
    rounds = end // 6
    assert stats.accepted == stats.drafted == end - rounds
    assert stats.rounds == -(-end // 6)
    assert stats.acceptance_rate in (None, 1.0)
    assert sum(stats.accepted_by_position) == stats.accepted


def test_timed_rounds_are_scaled_to_all_and_the_parts_add_up() -> None:
    recorder = Recorder()
    add(recorder, 2, 2, 3, RoundTimes(2.0, 0.5, 1.0))
    add(recorder, 2, 2, 3, RoundTimes(2.0))
    add(recorder, 0, 0, 1, RoundTimes(3.0))
    seconds = summary(recorder, decoding_seconds=8.0).seconds
    assert seconds.draft == 1.0
    assert seconds.verify == 2.0 + 3.0
    assert seconds.other == 2.0
    assert seconds.total == 11.0
