"""Figures stop at the last emitted token, and times are scaled from the timed rounds."""

from __future__ import annotations

import itertools

import pytest

from mlx_specdec.decoding.statistics import Recorder, RoundTimes, Statistics

from .mocks import Guesser, TableContext, decoding, run


def summary(recorder: Recorder, decoding_seconds: float = 10.0) -> Statistics:
    return recorder.summary(
        load=1, prompt=2, decoding=decoding_seconds, peak_memory_bytes=5, device="cpu", blas="mkl"
    )


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
    own = end // 6
    assert stats.accepted == stats.drafted == end - own
    assert stats.rounds == -(-end // 6)
    assert stats.acceptance_rate in (None, 1.0)
    assert sum(stats.accepted_by_position) == stats.accepted


def test_counts_by_position_add_up() -> None:
    recorder = Recorder()
    recorder.add_speculative(4, 2, 3, RoundTimes(1))
    recorder.add_speculative(4, 4, 5, RoundTimes(1))
    recorder.add_speculative(2, 0, 1, RoundTimes(1))
    stats = summary(recorder)
    assert stats.drafted_by_position == (3, 3, 2, 2)
    assert stats.accepted_by_position == (2, 2, 1, 1)
    assert (stats.drafted, stats.accepted) == (10, 6)
    assert stats.tokens_per_round == 3
    assert stats.tokens_per_second == 0.9


def test_a_round_cut_inside_its_accepted_run_counts_only_what_was_emitted() -> None:
    recorder = Recorder()
    recorder.add_speculative(5, 4, 2, RoundTimes(1))
    stats = summary(recorder)
    assert stats.drafted == stats.accepted == 2


def test_timed_rounds_are_scaled_to_all_and_the_parts_add_up() -> None:
    recorder = Recorder()
    recorder.add_speculative(2, 2, 3, RoundTimes(2.0, 0.5, 1.0))
    recorder.add_speculative(2, 2, 3, RoundTimes(2.0))
    recorder.add_plain(1, 3.0)
    seconds = summary(recorder, decoding_seconds=8.0).seconds
    assert seconds.draft == 1.0
    assert seconds.verify == 2.0 + 3.0
    assert seconds.other == 2.0
    assert seconds.total == 11.0


def test_a_few_first_rounds_and_then_few_are_timed() -> None:
    recorder = Recorder()
    timed = []
    for _ in range(100):
        timed.append(recorder.wants_times())
        recorder.add_speculative(1, 1, 2, RoundTimes(1.0))
    assert [index for index, yes in enumerate(timed) if yes] == [0, 1, 2, 3, 32, 64, 96]
    assert Recorder(time_all=True).wants_times()


def test_seconds_come_from_the_clock_that_was_handed_in() -> None:
    context = TableContext(3)
    expected = context.greedy([1], 6)
    ticks = itertools.count()
    recorder = Recorder(clock=lambda: float(next(ticks)))
    guesser = Guesser(lambda position, limit: expected[position : position + limit])
    run(decoding(context, guesser, count=2, room=6, recorder=recorder))
    seconds = summary(recorder, decoding_seconds=100.0).seconds
    assert seconds.draft == 2.0 and seconds.verify == 2.0


def test_an_empty_text_has_no_rates() -> None:
    stats = summary(Recorder(), decoding_seconds=0.0)
    assert stats.acceptance_rate is stats.tokens_per_round is stats.tokens_per_second is None
    assert stats.smallest_margin is None
