"""The end of a thought at its budget: counted token by token, and forced in masks."""

from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_specdec.core.constraint import ThoughtBudget
from mlx_specdec.core.distribution import Distribution, log_probabilities
from mlx_specdec.core.options import Options
from mlx_specdec.text.thoughts import Thoughts

BEGIN, END, SIZE = 1, 2, 40
LONG = (2, 3, 2)
"""A mark of several tokens whose beginning is like its end."""


def opened(budget: int | None = 3, end: tuple[int, ...] = (END,), **more: int) -> Thoughts:
    return Thoughts((BEGIN,), end, True, budget, **more)


def test_tokens_of_thoughts_are_counted_without_their_marks() -> None:
    closed = Thoughts((BEGIN,), LONG)
    assert closed.after([7, 8]).tokens == 0
    assert closed.after([BEGIN, 7, 8, *LONG, 9]).tokens == 2
    assert closed.after([BEGIN, 7, *LONG, BEGIN, 8, 9]).tokens == 3
    # A mark that is begun and not finished is a part of the thought.
    assert closed.after([BEGIN, 7, 2, 3]).tokens == 1
    assert closed.after([BEGIN, 7, 2, 3, 8]).tokens == 4
    assert closed.after([BEGIN, 7, 2, 3, 2]).tokens == 1
    # 2 3 3 2 3 2: the second beginning of the mark is the one that is finished.
    assert closed.after([BEGIN, 2, 3, 3, 2, 3, 2]).tokens == 3
    assert not closed.after([BEGIN, 2, 2, 3, 2]).open


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("end", [(END,), LONG])
def test_the_mark_is_forced_exactly_at_the_budget(budget: int, end: tuple[int, ...]) -> None:
    thoughts = opened(budget, end)
    for _ in range(budget):
        assert thoughts.forced is None
        thoughts = thoughts.after([9])
    for token in end:
        assert thoughts.forced == token
        thoughts = thoughts.after([token])
    assert not thoughts.open and thoughts.forced is None and thoughts.tokens == budget
    # A further thought has nothing left, so its mark is closed at once.
    assert thoughts.after([9, BEGIN]).forced == end[0]


def test_a_mark_that_is_begun_at_the_budget_is_finished() -> None:
    assert opened(3, LONG).after([9, 9, 2]).forced == 3
    assert opened(3, LONG).after([9, 9, 9]).forced == 2


@pytest.mark.parametrize("thoughts", [opened(3), opened(3, LONG), Thoughts((BEGIN, 5), (END,))])
def test_a_token_that_is_never_forced_is_free_after_all_tokens(thoughts: Thoughts) -> None:
    """All continuations of three tokens over the marks and another token."""
    for budget in range(4):
        start = replace(thoughts, budget=budget)
        continued = [start]
        for length in range(4):
            if start.never_forced(length + 1):
                assert all(each.forced is None for each in continued)
            continued = [
                each.after([token]) for each in continued for token in (BEGIN, END, 3, 5, 9)
            ]


def test_a_constraint_rests_far_from_the_budget() -> None:
    budget = ThoughtBudget(opened(9), SIZE)
    assert budget.idle(9) and not budget.idle(10)
    budget.take([9] * 8)
    assert budget.idle(1) and not budget.idle(2)


def test_rows_share_a_call_until_a_budget_is_near() -> None:
    settings = Options(temperature=1.0)
    logits = mx.random.normal((2, 3, SIZE), key=mx.random.key(1))
    drafted, committed = mx.array([[9, 8], [9, 8]]), [[7], [7]]
    for budget, forced in ((3, False), (2, True), (0, True)):
        limited = Distribution(settings, SIZE, constraint=ThoughtBudget(opened(budget), SIZE))
        free = Distribution(settings, SIZE)
        assert limited.kind == free.kind and limited.bound(3) == forced
        rows = log_probabilities([limited, free], logits, committed, drafted)
        expected = log_probabilities([free, free], logits, committed, drafted)
        assert mx.array_equal(rows[1], expected[1])
        assert mx.array_equal(rows[0], expected[0]) == (not forced)
        finite = mx.sum(rows[0] > -mx.inf, axis=-1).tolist()
        # The draft does not close the thought, so that all rows from the budget on are forced.
        assert finite == [SIZE if at < budget else 1 for at in range(3)]
