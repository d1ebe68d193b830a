"""The choice of the draft length on a fake clock, and the files in which costs are kept."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import system
from mlx_specdec.core import worth as module
from mlx_specdec.core.proposer import Drafter, Prices, Setup
from mlx_specdec.core.worth import (
    CHOICE_INTERVAL,
    LONG_PROMPT,
    TRIAL_INTERVAL,
    Memory,
    Worth,
    values,
)

from ..support.lengths import STEP, learn, run, teach


def never_made(setup: Setup) -> Any:
    """Make no proposer."""


DRAFT = Drafter("draft", never_made, nbytes=1)
OTHER = Drafter("other", never_made, nbytes=1, costs="other", text="other")
LOOKUP = Drafter("ngram", never_made, costs="free", text="ngram")
STOPS = Drafter("draft", never_made, most=7, nbytes=1, stops=True)
KEY = {"device": "cpu", "mlx": "1", "target": "t5", "target_bytes": 5}


def line(slope: float) -> Callable[[int], float]:
    """Return the cost ratios by draft length if a draft token costs `slope` plain steps."""
    return lambda drafted: 1 + slope * drafted


def known(*taught: tuple[Drafter, float, float], rows: int = 1) -> Memory:
    """Return a memory of candidates: plain steps per draft token, and acceptance rate."""
    memory = Memory()
    for candidate, cost, accepted in taught:
        teach(memory, candidate, line(cost), accepted, rows)
    return memory


def begun(
    memory: Memory | None, *candidates: Drafter, prompt: int = 5, remaining: int = 1_000
) -> Worth:
    """Return the choice for a row that has just begun, by default with a draft model."""
    worth = Worth(None, candidates or [DRAFT], memory)
    worth.begin(10, prompt, remaining)
    return worth


def kinds(lengths: list[int]) -> str:
    """Return a letter per round: 0 for plain decoding, x for drafts."""
    return "".join("x" if length else "0" for length in lengths)


def test_a_value_is_the_expected_number_of_tokens_per_cost() -> None:
    assert list(values([0.5, 0.25], [1.0, 2.0, 2.5])) == [1.0, 0.75, 0.7]
    assert list(values([0.5] * 9, [2.0, 1.0])) == [0.5, 1.5], "lengths without a cost are left out"


def test_prices_stop_a_draft_where_its_tokens_cost_more_than_they_bring() -> None:
    prices = Prices([1.0, 1.2, 1.4, 3.0], rate=2.0)
    assert prices.most([0.9, 0.8, 0.7]) == 0, "plain decoding brings two tokens in this time"
    assert replace(prices, rate=1.0).most([0.9, 0.8, 0.7]) == 2
    assert prices.least(3) == pytest.approx([0.4, 0.4, 3.2])
    assert Prices([1.0, 2.0, 2.0], rate=1.0).least(2) == pytest.approx([0.5, 0.0])


def test_a_fixed_length_ends_where_the_row_ends_and_learns_nothing() -> None:
    memory = Memory()
    worth = Worth(3, [DRAFT], memory)
    assert [worth.choose(remaining) for remaining in (9, 4, 3, 1)] == [3, 3, 2, 0]
    assert run(worth, 20, line(9.0), lambda number: 0) == [3] * 20
    assert worth.prices("draft") is None
    assert "acceptance draft" in memory.entries and not memory.rounds


@pytest.mark.parametrize(
    ("cost", "accepted", "expected"), [(0.1, 0.8, range(3, 9)), (0.9, 0.8, [0]), (0.01, 0.99, [16])]
)
def test_what_earlier_completions_found_decides_the_first_round(
    cost: float, accepted: float, expected: range | list[int]
) -> None:
    assert begun(known((DRAFT, cost, accepted))).choose(1_000) in expected


@pytest.mark.parametrize(("remaining", "most"), [(1, 16), (3, 16), (100, 2)])
def test_neither_the_end_nor_the_longest_draft_is_exceeded(remaining: int, most: int) -> None:
    candidate = replace(DRAFT, most=most)
    worth = begun(known((candidate, 0.01, 0.99)), candidate)
    assert worth.choose(remaining) == min(remaining - 1, most)


def test_without_knowledge_plain_steps_come_first_and_drafts_soon() -> None:
    chosen = run(Worth(None, [DRAFT]), 300, line(0.1), lambda number: (0, 3, 3, 4)[number % 4])
    assert chosen[:3] == [0, 0, 0] and any(chosen[:8])
    assert sum(2 <= n <= 6 for n in chosen[100:]) > 180


def test_rounds_that_were_not_timed_teach_no_costs() -> None:
    worth = Worth(None, [DRAFT])
    for _ in range(50):
        learn(worth, worth.choose(1_000), steps=None)
    assert worth.choose(1_000) == 0 and not worth.size(1).costs.known("")
    memory = known((DRAFT, 0.1, 0.8))
    worth = begun(memory)
    table = worth.size(1).costs
    before = [[*table.timed["draft"][4]], [*table.plain]]
    learn(worth, 4, 2, steps=None)
    learn(worth, 0, steps=None)
    assert [table.timed["draft"][4], table.plain] == before
    assert memory.entries["acceptance draft"][0][0] > 1000 - 4, "acceptance is learned from them"
    learn(worth, 4, 2, steps=9.0)
    assert table.timed["draft"][4] != before[0]


def test_asking_changes_nothing() -> None:
    asked, silent = Worth(None, [DRAFT]), Worth(None, [DRAFT])
    for number in range(100):
        for _ in range(number % 3):
            asked.limit("draft", 16), asked.prices("draft"), asked.reason, asked.choose(9)
        drafted = asked.choose(1_000)
        assert drafted == silent.choose(1_000)
        for worth in (asked, silent):
            learn(worth, drafted, drafted // 2, 1 + 0.1 * drafted)


def test_a_hopeless_draft_is_given_up_and_tried_again_now_and_then() -> None:
    chosen = run(Worth(None, [DRAFT]), 2_000, line(0.1), lambda number: 0)
    assert 0 < sum(map(bool, chosen[200:])) < 90


def test_a_draft_that_turns_good_is_taken_up_again() -> None:
    chosen = run(Worth(None, [DRAFT]), 3_000, line(0.1), lambda number: 16 * (number > 500))
    assert sum(n >= 2 for n in chosen[-300:]) > 250


def test_a_length_that_becomes_expensive_is_left() -> None:
    worth = Worth(None, [DRAFT], known((DRAFT, 0.1, 0.9)))
    before = run(worth, 50, line(0.1), lambda number: 8)[-1]
    after = run(worth, 1_200, line(0.7), lambda number: (1, 0, 2)[number % 3])
    assert before > 3 and sum(n <= 2 for n in after[-100:]) > 80


def test_trials_are_short_and_far_apart() -> None:
    worth = begun(known((DRAFT, 0.1, 0.8)))
    usual = worth.choose(1_000)
    chosen = run(worth, 10 * TRIAL_INTERVAL, line(0.1), lambda number: (8, 1, 4, 2)[number % 4])
    assert 0 < sum(abs(n - usual) > 3 for n in chosen) <= 3 * 16


def test_plain_decoding_is_tried_with_three_steps_as_often_in_a_batch() -> None:
    trials = []
    for rows in (1, 8):
        worth = Worth(None, [DRAFT], known((DRAFT, 0.1, 0.8), rows=rows))
        chosen = run(worth, 20 * TRIAL_INTERVAL, line(0.1), lambda number: number % 4, rows)
        trials.append(kinds(chosen).count("x000x"))
    assert trials[0] == trials[1] > 4


def test_short_completions_try_plain_decoding_too() -> None:
    memory, chosen = known((DRAFT, 0.4, 0.55)), []
    for _ in range(3 * TRIAL_INTERVAL // 5):
        chosen.append(run(begun(memory), 5, line(0.4), lambda number: number % 2))
    assert 1 <= sum(lengths[:3] == [0, 0, 0] for lengths in chosen) <= 3


def test_of_several_proposers_with_weights_the_best_one_drafts() -> None:
    worth = begun(known((DRAFT, 0.2, 0.6), (OTHER, 0.1, 0.8)), DRAFT, OTHER)
    assert worth.limit("draft", 16) == 0 < worth.limit("other", 16)


@pytest.mark.parametrize(("cost", "batched"), [(0.1, True), (0.8, False)])
def test_in_a_batch_drafts_must_beat_plain_decoding_by_more(cost: float, batched: bool) -> None:
    memory = known((DRAFT, cost, 0.95))
    teach(memory, DRAFT, line(cost), 0.95, rows=16)
    worth = Worth(None, [DRAFT], memory)
    assert worth.choose(100, rows=1) > 0
    assert (worth.choose(100, rows=16) > 0) is batched


@pytest.mark.parametrize(("prompt", "rows", "drafts"), [(5, 4, 1), (400, 4, 0), (400, 1, 1)])
def test_in_a_batch_drafts_must_gain_the_prefill_of_the_rows_that_come(
    prompt: int, rows: int, drafts: int
) -> None:
    worth = Worth(None, [DRAFT], known((DRAFT, 0.4, 0.8), rows=rows))
    for _ in range(CHOICE_INTERVAL):
        length = worth.choose(100, rows)
        learn(worth, length, length, 1.5, rows=rows, left=80, prompt=prompt)
    assert (worth.choose(100, rows) > 0) == drafts


def test_drafting_stops_after_a_long_context_and_comes_back() -> None:
    memory, found = known((DRAFT, 0.1, 0.8)), []
    teach(memory, DRAFT, line(1.0), 0.8, doublings=4)
    worth = Worth(None, [DRAFT], memory)
    for context in (10, 10_000, 10):
        worth.begin(context, 5, 1_000)
        found.append(worth.choose(1_000) > 0)
    assert found == [True, False, True]


def test_a_new_batch_size_begins_with_the_costs_of_half_of_it() -> None:
    memory = known((DRAFT, 0.3, 0.8), rows=4)
    table = Worth(None, [DRAFT], memory).size(8).costs
    first = table.ratios["draft"][1]
    assert 1.3 < first < 1.4, "0.3 was timed for half the rows, and 0.625 is assumed for these"
    table.add("", 0, 3 * STEP)
    table.fit()
    assert table.ratios["draft"][1] == pytest.approx(first, rel=0.01), "all costs are scaled"
    assert not Worth(None, [DRAFT], known((DRAFT, 0.3, 0.8), rows=2)).size(8).costs.known("")


def test_before_any_round_was_timed_drafts_promise_less_the_larger_the_batch() -> None:
    worth = Worth(None, [DRAFT], Memory())
    ratios = [worth.size(rows).costs.ratios["draft"][1] for rows in (1, 2, 8)]
    assert ratios == pytest.approx([1.25, 1.375, 1.625], rel=0.01)


def test_the_reason_names_acceptance_seconds_and_speed() -> None:
    worth = Worth(None, [DRAFT])
    assert worth.reason == "the draft length is 0 until plain steps were timed"
    run(worth, 4 * CHOICE_INTERVAL, line(0.1), lambda number: 2)
    assert "\n" not in worth.reason
    for part in (f"plain decoding: {1000 * STEP:.1f} ms", "draft tokens", "tokens/s"):
        assert part in worth.reason
    assert Worth(2).reason == "the draft length is fixed at 2"


def test_a_proposer_that_is_too_expensive_is_dropped_and_tried_again_much_later() -> None:
    memory, counts = Memory(), []
    for _ in range(3):
        counts.append(sum(map(bool, run(begun(memory), 100, line(9.0), lambda number: 16))))
    assert counts[0] <= 3 and sum(counts[1:]) <= 3
    worth = Worth(None, [DRAFT], known((DRAFT, 9.0, 0.9)))
    for drafted in range(1, 17):
        worth.size(1).costs.timed["draft"][drafted][1] = 2.0 * (drafted == 1)
    chosen = run(worth, 3_000, line(0.1), lambda number: 4)
    assert not any(chosen[:100]) and sum(map(bool, chosen[-50:])) > 40


def test_a_first_round_that_stalled_is_corrected_in_the_next_completion() -> None:
    stalled, memory = iter([1.0, 40.0]), Memory()
    for _ in range(5):
        chosen = run(
            begun(memory), 100, lambda n: next(stalled, 1.0) * (1 + 0.1 * n), lambda number: 4
        )
    assert sum(n >= 3 for n in chosen[-50:]) > 40


def test_a_later_stall_counts_little() -> None:
    worth = begun(known((DRAFT, 0.1, 0.8)))
    table = worth.size(1).costs
    learn(worth, 4, 2, steps=1_000.0)
    table.fit()
    assert table.ratios["draft"][4] < 1.4 * 1.25


def test_plain_steps_that_fill_or_empty_the_pipeline_are_not_timed() -> None:
    worth = begun(known((DRAFT, 0.9, 0.5)))
    before = worth.size(1).costs.plain[0]
    learn(worth, 0, steps=2.0)
    learn(worth, 0, steps=0.1, pipelined=False)
    assert worth.size(1).costs.plain[0] == before
    learn(worth, 0)
    learn(worth, 0, steps=1.5)
    assert worth.size(1).costs.plain[0] > before


def test_the_first_round_of_a_kind_in_a_process_is_not_timed() -> None:
    memory = known((DRAFT, 0.1, 0.8))
    memory.rounds.clear()
    worth = begun(memory)
    entry = worth.size(1).costs.timed["draft"][4]
    before = entry[0]
    learn(worth, 4, 1, steps=2.8)
    assert entry[0] == before
    learn(worth, 4, 1, steps=2.8)
    assert entry[0] > before


def test_the_prefill_of_a_proposer_is_not_timed_and_must_be_gained() -> None:
    memory = known((DRAFT, 0.1, 0.8))
    worth = begun(memory, prompt=1_000, remaining=10_000)
    assert worth.choose(10_000) == 0 and not worth.limit("draft", 1)
    learn(worth, 0, left=10_000)
    drafted = worth.choose(10_000)
    entry = worth.size(1).costs.timed["draft"][drafted]
    before = entry[0]
    learn(worth, drafted, 1, 1 + 0.1 * drafted + 50.0)
    assert entry[0] == before
    choices = []
    for remaining in (10, 4_000):
        worth = begun(memory, prompt=1_000, remaining=remaining)
        learn(worth, 0, left=remaining)
        choices.append(worth.choose(remaining))
    assert choices[0] == 0 < choices[1]


@pytest.mark.parametrize(("prompt", "eager"), [(LONG_PROMPT + 1, False), (LONG_PROMPT, True)])
def test_after_a_long_prompt_the_first_token_does_not_wait_for_the_draft(
    prompt: int, eager: bool
) -> None:
    memory = known((DRAFT, 0.1, 0.8), (LOOKUP, 0.1, 0.9))
    worth = begun(memory, LOOKUP, DRAFT, prompt=prompt)
    assert bool(worth.limit("draft", 1)) is eager
    assert worth.limit("ngram", 16) > 0


def test_prices_are_in_the_time_of_what_drafts_otherwise() -> None:
    rates = []
    for accepted in (0.1, 0.9):
        worth = begun(known((DRAFT, 0.1, accepted), (LOOKUP, 0.1, 0.5)), LOOKUP, DRAFT)
        prices = worth.prices("ngram")
        assert prices is not None and prices.rounds[:3] == pytest.approx([1.0, 1.1, 1.2], rel=0.01)
        rates.append(prices.rate)
    chances = list(accumulate([0.9] * 16, mul))
    best = max(values(chances, list(map(line(0.1), range(17)))))
    assert rates == [pytest.approx(1.0), pytest.approx(best, rel=0.05)]


@pytest.mark.parametrize(
    ("candidate", "verified"), [(STOPS, 1.0), (replace(STOPS, stops=False), 0.0)]
)
def test_a_token_at_which_a_proposer_stopped_counts_as_rejected(
    candidate: Drafter, verified: float
) -> None:
    memory = known((candidate, 0.1, 0.8))
    worth = begun(memory, candidate)
    assert worth.choose(1_000) > 2
    counts = memory.entries["acceptance draft"]
    for ended in (False, True):
        counts[0][1] = 0.0
        learn(worth, 1, 1, 1.1, ended=ended)
        assert counts[0][1] == (0.0 if ended else verified)


def test_plain_decoding_is_timed_again_if_it_was_timed_in_a_slow_moment() -> None:
    worth = Worth(None, [DRAFT], known((DRAFT, 0.5, 0.3)))
    for drafted in range(1, 17):
        worth.size(1).costs.timed["draft"][drafted][0] /= math.e
    worth.begin(10, 5, 10_000)
    chosen = run(worth, 20 * TRIAL_INTERVAL, line(0.5), lambda number: number % 3 == 0)
    assert (
        any(chosen[:TRIAL_INTERVAL])
        and sum(map(bool, chosen[-8 * TRIAL_INTERVAL :])) < TRIAL_INTERVAL
    )


def test_in_a_batch_lookup_rests_while_it_finds_nothing() -> None:
    worth = Worth(None, [LOOKUP], known((LOOKUP, 0.1, 0.5), rows=8))
    limits = []
    for _ in range(4 * TRIAL_INTERVAL):
        limits.append(worth.limit("ngram", 16, rows=8) > 0)
        learn(worth, 0, rows=8)
    assert 0 < sum(limits) <= TRIAL_INTERVAL
    for _ in range(TRIAL_INTERVAL):
        drafted = 2 * (worth.limit("ngram", 16, rows=8) > 0)
        learn(worth, drafted, drafted, 1 + 0.1 * drafted, proposer="ngram", rows=8)
    assert worth.limit("ngram", 16, rows=8) > 0


def test_plain_steps_that_vary_look_no_faster_than_they_are() -> None:
    table = Worth(None, [DRAFT], known((DRAFT, 0.1, 0.8))).size(1).costs
    seconds = []
    for number in range(200):
        table.add("", 0, (0.4, 1.6)[number % 2] * STEP)
        seconds.append(table.plain[0])
    assert sum(seconds[100:]) / 100 > 0.95 * STEP


def test_a_length_that_was_timed_in_a_slow_moment_is_judged_by_its_neighbors() -> None:
    table = Worth(None, [DRAFT], known((DRAFT, 0.3, 0.8))).size(1).costs
    for weight in (1, 8):
        table.timed["draft"][2][:] = STEP * math.e, weight
        table.fit()
        assert 1.6 < table.ratios["draft"][2] < math.exp(1.0)
    for drafted in range(1, 17):
        table.timed["draft"][drafted][1] *= drafted == 1
    table.fit()
    assert table.ratios["draft"][8] > table.ratios["draft"][4] > table.ratios["draft"][2]


def directory() -> Path:
    return system.cache_directory("draft-length")


def path() -> Path:
    return directory() / "pair.json"


def learned(file: Path | None = None) -> Memory:
    memory = Memory(file)
    run(Worth(None, [DRAFT], memory), 60, line(0.2), lambda number: number % 4)
    return memory


def test_what_was_learned_is_read_again_and_only_for_its_key() -> None:
    memory = module.memory(KEY)
    teach(memory, DRAFT, line(0.1))
    memory.save()
    again = Memory(next(directory().iterdir()))
    assert again.entries.keys() == memory.entries.keys() != set()
    assert Worth(None, [DRAFT], again).choose(100) == Worth(None, [DRAFT], memory).choose(100) > 0
    assert module.memory({**KEY, "mlx": "2"}).entries == {}


def test_files_of_another_layout_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = module.memory(KEY)
    memory.entries["plain"] = [1.0]
    memory.save()
    module._memory.cache_clear()
    monkeypatch.setattr(module, "COSTS_FORMAT", module.COSTS_FORMAT + 1)
    assert module.memory(KEY).entries == {}


def test_a_file_is_written_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    memory = module.memory(KEY)
    for seconds, read in ((0.0, ["one"]), (9.0, ["one"]), (11.0, ["one", "two", "three"])):
        now = 100.0 + seconds
        memory.entries[["one", "two", "three"][len(memory.entries)]] = [1]
        memory.save()
        [file] = directory().iterdir()
        assert list(Memory(file).entries) == read


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"null", b"\x80"])
def test_a_file_that_cannot_be_read_is_ignored_and_replaced(content: bytes) -> None:
    directory().mkdir(parents=True)
    path().write_bytes(content)
    assert Memory(path()).entries == {}
    learned(path()).save()
    assert Memory(path()).entries != {}


def test_a_place_that_cannot_be_written_harms_nobody() -> None:
    directory().parent.mkdir(parents=True)
    directory().write_text("a file where the directory would be")
    learned(path()).save()
    assert Memory(path()).entries == {}


def test_without_a_file_nothing_is_written() -> None:
    learned().save()
    assert not directory().exists()
