"""The times of rounds, on a fake clock, and what statistics make of them."""

from mlx_specdec.core.statistics import FIRST_TIMED, Stopwatch, Timed, summary
from mlx_specdec.results import Step
from mlx_specdec.types import Proposal, no_proposal


class Rounds:
    """A stopwatch whose rounds take a second before the verdict, and one after it."""

    def __init__(self, timed: bool = False) -> None:
        self.now = 0.0
        self.watch = Stopwatch(timed, lambda: self.now)

    def interval(self, group: str = "a", *, drafts: bool = False) -> float | None:
        """Take a round of a group, and return the seconds that the watch found for it."""
        proposal = Proposal.one_hot([[3]]) if drafts else no_proposal()
        self.watch.begin(drafts=drafts)
        if drafts:
            self.watch.drafted(proposal)
        self.watch._verified_at = self.now
        self.now += 1
        self.watch.judged(group)
        self.now += 1
        return self.watch.finish(proposal, pipelined=False).interval


def test_the_seconds_of_a_round_run_from_verdict_to_verdict() -> None:
    rounds = Rounds()
    assert [rounds.interval() for _ in range(3)] == [None, 2.0, 2.0]
    rounds.now += 5
    assert rounds.interval(drafts=True) == 7.0, "the caller's time belongs to the round"
    rounds.watch.interrupt()
    assert [rounds.interval() for _ in range(2)] == [None, 2.0]


def test_a_round_after_one_of_another_group_or_one_that_was_timed_in_parts_has_no_seconds() -> None:
    rounds = Rounds()
    found = [rounds.interval(group) for group in "aabba"]
    assert found == [None, 2.0, None, 2.0, None]
    rounds = Rounds(timed=True)
    found = [rounds.interval(drafts=True) for _ in range(FIRST_TIMED + 2)]
    assert found == [None] * (FIRST_TIMED + 1) + [2.0]


def test_timed_rounds_are_scaled_to_all_and_the_parts_add_up() -> None:
    drafted = Step(tokens=(1, 2, 3), drafted=2, accepted=2)
    rounds = [
        (drafted, Timed(2.0, draft=0.5, verify=1.0, drafts=True)),
        (drafted, Timed(2.0, passes=2, drafts=True)),
        (Step(tokens=(4,)), Timed(3.0)),
    ]
    stats = summary(rounds, load=1, prompt=2, decoding=8.0)
    seconds = stats.seconds
    assert (seconds.draft, seconds.verify) == (1.0, 2.0 + 3.0)
    assert (seconds.other, seconds.total) == (2.0, 11.0)
    assert (stats.target_passes, stats.timed_rounds, stats.tokens_per_round) == (4, 1, 7 / 3)
