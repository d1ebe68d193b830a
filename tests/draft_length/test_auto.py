"""Which draft length is chosen, on a fake clock."""

import math
from dataclasses import replace

import pytest

from mlx_specdec.draft_length.auto import EVERY, EXPLORE, LONG_PROMPT, AutoLength, Source
from mlx_specdec.draft_length.length import FixedLength
from mlx_specdec.draft_length.saved import Memory
from mlx_specdec.errors import OptionError

from ..support.lengths import STEP, a_round, run, teach

DRAFT = Source("draft")
OTHER = Source("other", costs="other", text="other")
LOOKUP = Source("ngram", free=True, costs="free", text="ngram")
STOPS = Source("draft", most=7, stops=True)


def cheap(drafted: int) -> float:
    return 1 + 0.1 * drafted


def dear(drafted: int) -> float:
    return 1 + 2.0 * drafted


def known(*costs: tuple[Source, float, float], rows: int = 1, doublings: int = 0) -> Memory:
    """Return what is known of sources: plain steps per draft token, and acceptance."""
    memory = Memory()
    for source, cost, accepted in costs:
        teach(memory, source, lambda n, cost=cost: 1 + cost * n, accepted, rows, doublings)
    return memory


def alone(lengths: AutoLength, context: int = 10, prompt: int = 5, remaining: int = 1_000) -> int:
    """Begin a text, and return the first draft length."""
    lengths.begin(context, prompt, remaining)
    return lengths.choose(remaining)


def test_a_fixed_length_is_cut_at_the_end_and_cannot_be_negative() -> None:
    assert [FixedLength(3).choose(remaining) for remaining in (9, 4, 3, 1)] == [3, 3, 2, 0]
    with pytest.raises(OptionError, match="num-draft must be 0 or more"):
        FixedLength(-1)


def test_what_is_known_decides_the_first_round() -> None:
    assert 3 <= alone(AutoLength([DRAFT], known((DRAFT, 0.1, 0.8)))) <= 8
    assert alone(AutoLength([DRAFT], known((DRAFT, 0.9, 0.8)))) == 0
    assert alone(AutoLength([DRAFT], known((DRAFT, 0.01, 0.99)))) == 16


@pytest.mark.parametrize(("remaining", "most"), [(1, 16), (3, 16), (100, 2)])
def test_neither_the_end_nor_the_longest_draft_is_overrun(remaining: int, most: int) -> None:
    source = replace(DRAFT, most=most)
    lengths = AutoLength([source], known((source, 0.01, 0.99)))
    lengths.begin(10, 5, 1_000)
    assert lengths.choose(remaining) == min(remaining - 1, most)


def test_without_knowledge_plain_steps_come_first_and_drafts_soon() -> None:
    chosen = run(AutoLength([DRAFT]), 300, cheap, lambda number: (0, 3, 3, 4)[number % 4])
    assert chosen[:3] == [0, 0, 0] and any(chosen[:8])
    assert sum(2 <= n <= 6 for n in chosen[100:]) > 180


def test_asking_changes_nothing() -> None:
    asked, silent = AutoLength([DRAFT]), AutoLength([DRAFT])
    for number in range(100):
        for _ in range(number % 3):
            asked.limit("draft", 16), asked.prices("draft"), asked.reason, asked.choose(9)
        drafted = asked.choose(1_000)
        assert drafted == silent.choose(1_000)
        for lengths in (asked, silent):
            lengths.on_round(a_round(drafted, drafted // 2, cheap(drafted)))


def test_a_hopeless_draft_is_given_up_and_tried_again_now_and_then() -> None:
    chosen = run(AutoLength([DRAFT]), 2_000, cheap, lambda number: 0)
    assert 0 < sum(map(bool, chosen[200:])) < 90


def test_a_draft_that_turns_good_is_taken_up_again() -> None:
    chosen = run(AutoLength([DRAFT]), 3_000, cheap, lambda number: 16 * (number > 500))
    assert sum(n >= 2 for n in chosen[-300:]) > 250


def test_a_length_that_becomes_expensive_is_left() -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 0.1, 0.9)))
    before = run(lengths, 50, cheap, lambda number: 8)[-1]
    after = run(lengths, 1_200, lambda n: 1 + 0.7 * n, lambda number: (1, 0, 2)[number % 3])
    assert before > 3 and sum(n <= 2 for n in after[-100:]) > 80


def test_explorations_are_short_and_far_apart() -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 0.1, 0.8)))
    usual = alone(lengths)
    chosen = run(lengths, 10 * EXPLORE, cheap, lambda number: (8, 1, 4, 2)[number % 4])
    strange = sum(abs(n - usual) > 3 for n in chosen)
    assert 0 < strange <= 3 * 16


def test_plain_decoding_is_explored_with_three_steps() -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 0.4, 0.55)))
    chosen = run(lengths, 40 * EXPLORE, lambda n: 1 + 0.4 * n, lambda number: number % 2)
    text = "".join("0" if n == 0 else "x" for n in chosen)
    assert "x000x" in text and text.count("x") > 30 * EXPLORE


def test_trials_in_a_batch_are_rarer() -> None:
    trials = []
    for rows in (1, 8):
        memory = known((DRAFT, 0.1, 0.8), rows=rows)
        chosen = run(AutoLength([DRAFT], memory), 20 * EXPLORE, cheap, lambda n: n % 4, rows)
        trials.append("".join("0" if n == 0 else "x" for n in chosen).count("x000x"))
    assert trials[0] >= 4 * trials[1] > 0


def test_short_texts_try_plain_decoding_too() -> None:
    memory, chosen = known((DRAFT, 0.4, 0.55)), []
    for _ in range(3 * EXPLORE // 5):
        lengths = AutoLength([DRAFT], memory)
        lengths.begin(10, 5, 1_000)
        chosen.append(run(lengths, 5, lambda n: 1 + 0.4 * n, lambda number: number % 2))
    assert 1 <= sum(text[:3] == [0, 0, 0] for text in chosen) <= 3


def test_of_several_sources_with_weights_the_best_one_drafts() -> None:
    memory = known((DRAFT, 0.2, 0.6), (OTHER, 0.1, 0.8))
    lengths = AutoLength([DRAFT, OTHER], memory)
    alone(lengths)
    assert lengths.limit("draft", 16) == 0 < lengths.limit("other", 16)


@pytest.mark.parametrize(("cost", "batched"), [(0.1, True), (0.8, False)])
def test_in_a_batch_drafts_must_beat_plain_decoding_by_more(cost: float, batched: bool) -> None:
    memory = known((DRAFT, cost, 0.95))
    teach(memory, DRAFT, lambda n: 1 + cost * n, 0.95, rows=16)
    lengths = AutoLength([DRAFT], memory)
    assert lengths.choose(100, rows=1) > 0
    assert (lengths.choose(100, rows=16) > 0) is batched


def test_drafting_stops_behind_a_long_context_and_comes_back() -> None:
    memory = known((DRAFT, 0.1, 0.8))
    teach(memory, DRAFT, lambda n: 1 + n, 0.8, doublings=4)
    lengths = AutoLength([DRAFT], memory)
    assert alone(lengths) > 0
    assert alone(lengths, context=10_000) == 0
    assert alone(lengths) > 0


def test_the_reason_names_acceptance_seconds_and_speed() -> None:
    lengths = AutoLength([DRAFT])
    assert lengths.reason == "the draft length is 0 until plain steps were timed"
    run(lengths, 4 * EVERY, cheap, lambda number: 2)
    assert "\n" not in lengths.reason
    plain = f"plain decoding: {1000 * STEP:.1f} ms"
    for part in (plain, "draft tokens", "ms per round", "tokens/s"):
        assert part in lengths.reason


def test_a_proposer_that_is_too_expensive_is_dropped_and_stays_dropped() -> None:
    memory = Memory()
    counts = []
    for _ in range(3):
        lengths = AutoLength([DRAFT], memory)
        lengths.begin(10, 5, 1_000)
        counts.append(sum(map(bool, run(lengths, 100, lambda n: 1 + 9.0 * n, lambda number: 16))))
    assert counts[0] <= 3 and sum(counts[1:]) <= 3


def test_a_first_round_that_stalled_is_corrected_in_the_next_completion() -> None:
    stalled, memory = iter([1.0, 40.0]), Memory()
    for _ in range(5):
        lengths = AutoLength([DRAFT], memory)
        lengths.begin(10, 5, 1_000)
        chosen = run(lengths, 100, lambda n: next(stalled, 1.0) * cheap(n), lambda number: 4)
    assert sum(n >= 3 for n in chosen[-50:]) > 40


def test_plain_steps_that_fill_or_empty_the_pipeline_are_not_timed() -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 0.9, 0.5)))
    lengths.begin(10, 5, 1_000)
    before = lengths.size(1).table.seconds
    lengths.on_round(a_round(0, steps=2.0))
    lengths.on_round(a_round(0, steps=0.1, pipelined=False))
    assert lengths.size(1).table.seconds == before
    lengths.on_round(a_round(0))
    lengths.on_round(a_round(0, steps=1.5))
    assert lengths.size(1).table.seconds > before


@pytest.mark.parametrize(("pipelined", "dearer"), [(True, True), (False, False)])
def test_a_plain_step_that_wastes_a_pass_at_the_end_costs_two(
    pipelined: bool, dearer: bool
) -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 0.9, 0.5)))
    lengths.begin(10, 5, 1_000)
    before = lengths.size(1).table.seconds
    lengths.on_round(a_round(0))
    lengths.on_round(a_round(0, pipelined=pipelined, ended=True))
    assert (lengths.size(1).table.seconds > 1.05 * before) is dearer


def test_the_first_round_of_a_kind_in_a_process_is_not_timed() -> None:
    memory = known((DRAFT, 0.1, 0.8))
    memory.rounds.clear()
    lengths = AutoLength([DRAFT], memory)
    lengths.begin(10, 5, 1_000)
    drafted = lengths.choose(1_000)
    entry = lengths.size(1).table.entry("draft", drafted)
    before = entry[0]
    lengths.on_round(a_round(drafted, 1, 2 * cheap(drafted)))
    assert entry[0] == before
    lengths.on_round(a_round(drafted, 1, 2 * cheap(drafted)))
    assert entry[0] > before


def test_the_prefill_of_a_proposer_is_timed_apart_and_must_be_gained() -> None:
    memory = known((DRAFT, 0.1, 0.8))
    lengths = AutoLength([DRAFT], memory)
    lengths.begin(10, 1_000, 10_000)
    assert lengths.choose(10_000) == 0 and not lengths.eager("draft")
    lengths.on_round(a_round(0, left=10_000))
    drafted = lengths.choose(10_000)
    entry = lengths.size(1).table.entry("draft", drafted)
    before = entry[0]
    lengths.on_round(a_round(drafted, 1, cheap(drafted) + 50.0))
    assert entry[0] == before
    assert memory.entries["prefill of draft"][0] == pytest.approx(0.025, rel=0.1)
    choices = []
    for remaining in (40, 4_000):
        lengths = AutoLength([DRAFT], memory)
        lengths.begin(10, 1_000, remaining)
        lengths.on_round(a_round(0, left=remaining))
        choices.append(lengths.choose(remaining))
    assert choices[0] == 0 < choices[1]


def test_after_a_long_prompt_the_first_token_does_not_wait_for_the_draft() -> None:
    lengths = AutoLength([LOOKUP, DRAFT], known((DRAFT, 0.1, 0.8), (LOOKUP, 0.1, 0.9)))
    for prompt, eager in ((LONG_PROMPT + 1, False), (LONG_PROMPT, True)):
        lengths.begin(10, prompt, 1_000)
        assert lengths.eager("draft") is eager
        assert lengths.limit("ngram", 16) > 0


def test_lookup_has_prices_in_the_time_of_what_drafts_otherwise() -> None:
    tokens = []
    for accepted in (0.1, 0.9):
        lengths = AutoLength([LOOKUP, DRAFT], known((DRAFT, 0.1, accepted), (LOOKUP, 0.1, 0.5)))
        lengths.begin(10, 5, 1_000)
        prices = lengths.prices("ngram")
        assert prices is not None and prices.rounds[:3] == pytest.approx([1.0, 1.1, 1.2], rel=0.01)
        tokens.append(prices.token)
    assert tokens[0] == pytest.approx(1.0) and tokens[1] < 0.5


def test_a_proposer_that_stops_has_prices() -> None:
    lengths = AutoLength([STOPS], known((STOPS, 0.1, 0.8)))
    lengths.begin(10, 5, 1_000)
    lengths.on_round(a_round(4, 4, 1.4))
    lengths.on_round(a_round(4, 4, 1.4))
    lengths.begin(10, 5, 1_000)
    assert lengths.prices("draft") is not None
    chosen = run(AutoLength([STOPS]), 30, cheap, lambda number: 4)
    assert any(chosen)


@pytest.mark.parametrize(("source", "verified"), [(STOPS, 1.0), (replace(STOPS, stops=False), 0)])
def test_a_token_at_which_a_proposer_stopped_counts_as_rejected(
    source: Source, verified: float
) -> None:
    memory = known((source, 0.1, 0.8))
    lengths = AutoLength([source], memory)
    lengths.begin(10, 5, 1_000)
    assert lengths.choose(1_000) > 2
    counts = memory.entries["acceptance draft"]
    for ended in (False, True):
        counts[0][1] = 0.0
        lengths.on_round(a_round(1, 1, 1.1, ended=ended))
        assert counts[0][1] == (0.0 if ended else verified)


def test_a_new_batch_size_begins_with_the_costs_of_the_nearest_one() -> None:
    memory = known((DRAFT, 0.3, 0.8), rows=4)
    lengths = AutoLength([DRAFT], memory)
    ratios = lengths.size(8).table.ratios["draft"]
    assert ratios[:3] == pytest.approx([1.0, 1.3, 1.6], rel=0.01)


def test_plain_decoding_is_timed_again_if_it_was_timed_in_a_slow_moment() -> None:
    memory = known((DRAFT, 0.5, 0.3))
    lengths = AutoLength([DRAFT], memory)
    for drafted in range(1, 17):
        lengths.size(1).table.entry("draft", drafted)[0] -= 1.0
    lengths.begin(10, 5, 10_000)
    chosen = run(lengths, 20 * EXPLORE, lambda n: 1 + 0.5 * n, lambda number: number % 3 == 0)
    assert any(chosen[:EXPLORE]) and sum(map(bool, chosen[-8 * EXPLORE :])) < EXPLORE


def test_in_a_batch_lookup_rests_while_it_finds_nothing() -> None:
    lengths = AutoLength([LOOKUP], known((LOOKUP, 0.1, 0.5), rows=8))
    limits = []
    for _ in range(4 * EXPLORE):
        limits.append(lengths.limit("ngram", 16, rows=8) > 0)
        lengths.on_round(a_round(0, rows=8))
    assert 0 < sum(limits) <= EXPLORE
    for _ in range(EXPLORE):
        if lengths.limit("ngram", 16, rows=8):
            lengths.on_round(a_round(2, 2, 1.2, source="ngram", rows=8))
        else:
            lengths.on_round(a_round(0, rows=8))
    assert lengths.limit("ngram", 16, rows=8) > 0


def test_plain_steps_that_vary_look_no_faster_than_they_are() -> None:
    table = AutoLength([DRAFT], known((DRAFT, 0.1, 0.8))).size(1).table
    seconds = []
    for number in range(200):
        table.add("", 0, (0.4, 1.6)[number % 2] * STEP)
        seconds.append(table.seconds)
    assert sum(seconds[100:]) / 100 > 0.95 * STEP


def test_a_length_that_was_timed_in_a_slow_moment_is_judged_by_its_neighbors() -> None:
    memory = known((DRAFT, 0.3, 0.8))
    table = AutoLength([DRAFT], memory).size(1).table
    for weight in (1, 8):
        table.entry("draft", 2)[:] = math.log(STEP) + 1.0, weight
        table.fit()
        assert 1.6 < table.ratios["draft"][2] < math.exp(1.0)
    for drafted in range(1, 17):
        table.entry("draft", drafted)[1] *= drafted == 1
    table.fit()
    assert table.ratios["draft"][8] > table.ratios["draft"][4] > table.ratios["draft"][2]


def test_a_proposer_that_was_too_expensive_is_tried_again_much_later() -> None:
    lengths = AutoLength([DRAFT], known((DRAFT, 9.0, 0.9)))
    for drafted in range(1, 17):
        lengths.size(1).table.entry("draft", drafted)[1] = 2.0 * (drafted == 1)
    chosen = run(lengths, 3_000, cheap, lambda number: 4)
    assert not any(chosen[:100]) and sum(map(bool, chosen[-50:])) > 40
