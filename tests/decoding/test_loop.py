"""The loop on mocks: same text whatever is guessed, one pass a round, nothing seen twice."""

from __future__ import annotations

import itertools
import random

import mlx.core as mx
import pytest

from mlx_specdec.contracts import Round
from mlx_specdec.decoding.draft_length import AutoLength
from mlx_specdec.decoding.statistics import Recorder
from mlx_specdec.sampling.noise import CoupledNoise
from mlx_specdec.sampling.settings import Sampling

from .mocks import VOCABULARY, Guesser, TableContext, decoding, run

ROOM = 30


def partly_right(text: list[int], seed: int, abstain: float = 0.0) -> Guesser:
    """Guesses the text itself, with errors at random places and sometimes nothing."""
    dice = random.Random(seed)

    def guess(position: int, limit: int) -> list[int]:
        if dice.random() < abstain:
            return []
        right = text[position : position + limit]
        right += [0] * (limit - len(right))
        return [token if dice.random() < 0.7 else (token + 1) % VOCABULARY for token in right]

    return Guesser(guess)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("abstain", [0.0, 0.4])
def test_the_text_is_the_targets_own(seed: int, count: int, abstain: float) -> None:
    context = TableContext(seed)
    expected = context.greedy([1], ROOM)
    loop = decoding(context, partly_right(expected, seed, abstain), count=count, room=ROOM)
    tokens, text, reason = run(loop)
    assert tokens == expected
    assert reason == "length"
    assert text == "".join(chr(97 + token) for token in expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.3),
        Sampling(repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
    ],
)
def test_speculation_does_not_change_a_sampled_or_penalised_text(
    seed: int, settings: Sampling
) -> None:
    texts = []
    for count in (0, 1, 4, 7):
        context = TableContext(seed)
        noise = CoupledNoise(seed, VOCABULARY) if settings.temperature > 0 else None
        guesser = partly_right(texts[0] if texts else [], seed, abstain=0.2)
        loop = decoding(context, guesser, count=count, room=ROOM, settings=settings, noise=noise)
        texts.append(run(loop)[0])
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize("place", range(12))
@pytest.mark.parametrize("count", [3, 5])
def test_an_eos_ends_the_text_wherever_it_comes(place: int, count: int) -> None:
    context = TableContext(place)
    expected = context.greedy([1], ROOM)
    eos = expected[place]
    end = expected.index(eos)
    for guesses in (expected, [0] * ROOM):
        guesser = Guesser(lambda position, limit, g=guesses: g[position : position + limit])
        loop = decoding(TableContext(place), guesser, count=count, room=ROOM, eos=[eos])
        tokens, text, reason = run(loop)
        assert tokens == expected[: end + 1]
        assert reason == "eos"
        assert len(text) == end


@pytest.mark.parametrize("room", range(8))
@pytest.mark.parametrize("count", [0, 1, 5])
def test_the_room_is_filled_and_never_overrun(room: int, count: int) -> None:
    context = TableContext(3)
    expected = context.greedy([1], 10)
    guesser = Guesser(lambda position, limit: expected[position : position + limit])
    tokens, _, reason = run(decoding(context, guesser, count=count, room=room))
    assert tokens == expected[:room]
    assert reason == "length"
    assert all(limit <= max(room - 1, 0) for limit in guesser.limits)


def test_a_speculative_round_is_one_pass_over_what_is_unseen() -> None:
    context = TableContext(1)
    expected = context.greedy([1], 12)
    guesser = Guesser(lambda position, limit: expected[position : position + limit])
    run(decoding(context, guesser, count=3, room=12))
    assert context.calls == [(4, 3), (4, 3), (4, 3)]


def test_rejected_tokens_are_taken_back_and_the_rest_is_final() -> None:
    context = TableContext(1)
    expected = context.greedy([1], 8)
    wrong_at = {0: 1}

    def guess(position: int, limit: int) -> list[int]:
        right = list(expected[position : position + limit])
        if position in wrong_at:
            right[wrong_at[position]] = (right[wrong_at[position]] + 1) % VOCABULARY
        return right

    loop = decoding(context, Guesser(guess), count=3, room=8)
    emission = loop.step()
    assert list(emission.tokens) == expected[:2]
    assert context.lengths == (2,)
    assert context.rewinds == [2]
    assert [piece.drafted for piece in emission.pieces] == [True, False]


def test_plain_decoding_submits_the_next_step_before_it_reads() -> None:
    context = TableContext(2)
    loop = decoding(context, None, room=6)
    loop.step()
    assert len(context.calls) == 2
    run(loop)
    assert context.calls == [(1, 0)] * 6


def test_a_submitted_step_is_read_before_speculation_starts_again() -> None:
    class Switching:
        def __init__(self) -> None:
            self.wanted = itertools.cycle([0, 0, 3, 3, 0, 3])

        def choose(self, room: int) -> int:
            return min(next(self.wanted), room - 1)

        def observe(self, *told: object) -> None:
            pass

    context = TableContext(4)
    expected = context.greedy([1], ROOM)
    guesser = partly_right(expected, 4)
    loop = decoding(context, guesser, room=ROOM, draft_length=Switching())
    assert run(loop)[0] == expected


@pytest.mark.parametrize("seed", range(4))
def test_a_draft_length_that_learns_does_not_change_the_text(seed: int) -> None:
    context = TableContext(seed)
    expected = context.greedy([1], 80)
    guesser = partly_right(expected, seed, abstain=0.1)
    lengths = AutoLength()
    assert run(decoding(context, guesser, room=80, draft_length=lengths))[0] == expected
    assert guesser.limits


def test_observe_sees_every_round_but_the_last_with_its_scores() -> None:
    context = TableContext(5)
    expected = context.greedy([1], 10)
    guesser = partly_right(expected, 5, abstain=0.3)
    run(decoding(context, guesser, count=3, room=10))
    committed = 1
    for seen in guesser.rounds:
        assert isinstance(seen, Round)
        committed += seen.accepted + 1
        assert seen.committed == committed
        rows = seen.scores.logits[0, -(seen.proposal.size + 1) :]
        own = mx.argmax(rows, axis=-1).tolist()[: seen.accepted + 1]
        assert own == expected[committed - 2 - seen.accepted : committed - 1]


def test_taps_are_handed_over_from_the_first_pass_on() -> None:
    context = TableContext(6)
    expected = context.greedy([1], 10)
    guesser = Guesser(
        lambda position, limit: expected[position : position + limit], taps=("final",)
    )
    tokens, _, _ = run(decoding(context, guesser, count=3, room=10))
    assert tokens == expected
    assert guesser.begun[0] is not None and guesser.begun[0].hidden["final"].shape[1] == 1
    assert all("final" in seen.scores.hidden for seen in guesser.rounds)


@pytest.mark.parametrize("room", [1, 9, 16, 50])
@pytest.mark.parametrize("count", [0, 4])
def test_margins_cover_every_emitted_position_and_no_other(room: int, count: int) -> None:
    context = TableContext(7)
    expected = context.greedy([1], room)
    text = [1, *expected]
    margins = []
    for index in range(room):
        row = sorted(context.table[text[index - 1] if index else 0, text[index]].tolist())
        margins.append(row[-1] - row[-2])
    recorder = Recorder()
    guesser = partly_right(expected, 7)
    run(decoding(context, guesser, count=count, room=room, recorder=recorder))
    stats = recorder.summary(
        load=0, prompt=0, decoding=1, peak_memory_bytes=0, device="cpu", blas="none"
    )
    assert stats.smallest_margin.value == pytest.approx(min(margins), abs=1e-5)
    assert margins[stats.smallest_margin.position] == pytest.approx(min(margins), abs=1e-5)


def test_an_interrupted_text_keeps_what_was_emitted() -> None:
    context = TableContext(8)
    loop = decoding(context, None, room=6)
    first = loop.step()
    last = loop.interrupt()
    assert last.finish_reason == "interrupted"
    assert first.tokens and not last.tokens


def test_margins_of_an_interrupted_text_are_told() -> None:
    recorder = Recorder()
    loop = decoding(TableContext(8), None, room=6, recorder=recorder)
    loop.step()
    loop.interrupt()
    loop.finish()
    stats = recorder.summary(
        load=0, prompt=0, decoding=1, peak_memory_bytes=0, device="cpu", blas="none"
    )
    assert stats.smallest_margin.position == 0


def test_a_proposer_that_abstains_stays_in_the_pipeline_of_plain_decoding() -> None:
    """The pass for the next token is submitted before the last one is read, and none is wasted."""
    passes = {}
    for name, guesser in (("plain", None), ("abstains", Guesser(lambda position, limit: []))):
        context = TableContext(3)
        recorder = Recorder()
        loop = decoding(context, guesser, count=4, room=ROOM, recorder=recorder)
        loop.step()
        assert context.lengths[0] == len(loop.committed)
        run(loop)
        stats = recorder.summary(
            load=0, prompt=0, decoding=1, peak_memory_bytes=0, device="cpu", blas="none"
        )
        passes[name] = stats.target_passes
    assert passes["abstains"] == passes["plain"] == ROOM


@pytest.mark.parametrize("seed", range(8))
def test_what_is_found_while_a_step_is_in_flight_is_verified_one_token_later(seed: int) -> None:
    context = TableContext(seed)
    expected = context.greedy([1], ROOM)

    def guess(position: int, limit: int) -> list[int]:
        return expected[position : position + limit] if position >= 10 else []

    recorder = Recorder()
    loop = decoding(context, Guesser(guess), count=4, room=ROOM, recorder=recorder)
    assert run(loop)[0] == expected
    stats = recorder.summary(
        load=0, prompt=0, decoding=1, peak_memory_bytes=0, device="cpu", blas="none"
    )
    # Eleven plain steps, then rounds of five tokens: 30 = 11 + 3 * 5 + 4.
    assert stats.rounds == 11 + 4
    assert stats.accepted == 3 * 4 + 3


def test_what_earlier_rounds_left_to_compute_is_not_the_drafts_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]

    def wait() -> None:
        now[0] += 5.0

    monkeypatch.setattr(mx, "synchronize", wait)
    recorder = Recorder(time_all=True, clock=lambda: now[0])
    context = TableContext()
    guesser = Guesser(lambda position, limit: [0] * limit)
    tokens, _, _ = run(decoding(context, guesser, room=6, recorder=recorder))
    stats = recorder.summary(
        load=0, prompt=0, decoding=now[0], peak_memory_bytes=0, device="cpu", blas="none"
    )
    assert len(tokens) == 6 and stats.timed_rounds > 0
    assert (stats.seconds.draft, stats.seconds.verify) == (0, 0)
    assert stats.seconds.other == 5.0 * stats.timed_rounds
