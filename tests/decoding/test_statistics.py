"""Times are scaled from the timed rounds."""

from mlx_specdec.decoding.statistics import Recorder, Statistics
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound


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
