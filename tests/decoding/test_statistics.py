"""Figures stop at the last emitted token, and times are scaled from the timed rounds."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_specdec.decoding.statistics import Recorder, Statistics, Stopwatch, Timed
from mlx_specdec.interfaces import Proposal, Scores, no_proposal
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound

from ..support.mocks import Guesser, TableContext, decoding, run


def summary(recorder: Recorder, decoding_seconds: float = 10.0) -> Statistics:
    return recorder.summary(
        load=1, prompt=2, decoding=decoding_seconds, peak_memory_bytes=5, device="cpu", blas="mkl"
    )


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
    own = end // 6
    assert stats.accepted == stats.drafted == end - own
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


def test_where_no_round_was_timed_the_parts_are_not_told() -> None:
    recorder = Recorder()
    add(recorder, 2, 2, 3, RoundTimes(2.0))
    add(recorder, 0, 0, 1, RoundTimes(3.0))
    seconds = summary(recorder, decoding_seconds=8.0).seconds
    assert seconds.draft is seconds.verify is seconds.other is None
    assert (seconds.decoding, seconds.total) == (8.0, 11.0)
    plain = Recorder()
    add(plain, 0, 0, 1, RoundTimes(3.0))
    seconds = summary(plain, decoding_seconds=4.0).seconds
    assert (seconds.draft, seconds.verify, seconds.other) == (0.0, 3.0, 1.0)


def timed_rounds(count: int, timed: Timed = "none") -> list[int]:
    reports: list[RoundReport] = []

    class Ears:
        def on_round(self, report: RoundReport) -> None:
            reports.append(report)

    watch = Stopwatch([Ears()], timed=timed)
    proposal = Proposal.one_hot([[1]])
    for _ in range(count):
        watch.begin(drafts=True)
        watch.drafted(proposal)
        watch.advanced(Scores(mx.zeros((1, 2, 3))))
        watch.finish(proposal, (), pipelined=False, ended=False)
        watch.begin(drafts=False)
        watch.finish(no_proposal(), (), pipelined=True, ended=False)
    drafts = [report for report in reports if report.size]
    assert all(r.times.draft is None for r in reports if not r.size)
    assert [report.passes for report in reports] == [1, 0] * count
    return [number for number, report in enumerate(drafts) if report.times.draft is not None]


def test_rounds_are_timed_in_parts_where_somebody_wants_it() -> None:
    assert timed_rounds(100, "some") == [0, 1, 2, 3, 32, 64, 96]
    assert timed_rounds(100, "all") == list(range(100))
    assert timed_rounds(100) == []
