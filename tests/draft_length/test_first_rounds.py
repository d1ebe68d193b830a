"""A device compiles kernels in the first round of each kind: no cost is learned from that round."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.draft_length.auto_length import AutoLength
from mlx_specdec.draft_length.costs import TOO_EXPENSIVE
from mlx_specdec.draft_length.first_rounds import FirstRounds
from mlx_specdec.draft_length.saved import Memory, costs_of, directory
from mlx_specdec.engine import opening
from mlx_specdec.engine.opening import drafters, make_draft_length, memory
from mlx_specdec.engine.pair import Pair
from mlx_specdec.interfaces.results import RoundReport, RoundTimes, SequenceRound
from mlx_specdec.measure import calibrate as calibration
from mlx_specdec.measure.calibrate import (
    FIRST_LENGTHS,
    LEAST_TURNS,
    LONG,
    SECONDS,
    SHORT,
    Survey,
    calibrate,
    calibrate_first,
)
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options

from ..support.draft_length_simulator import DRAFT, a_round
from ..support.pairs import decoder_only

COMPILING = 0.3
"""Seconds that a device may take to compile the kernels of one draft length."""
ACCEPTED = 0.75
"""Chance that the simulated target accepts a draft token."""
OPTIONS = Options(max_tokens=200, proposer="draft", num_draft="auto")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is one that compiles kernels."""
    for module in (calibration, opening):
        monkeypatch.setattr(module, "on_cpu", lambda: False)


class Device:
    """A simulated device that compiles kernels in the first round of each length.

    plain: Seconds of a plain decoding step. compiling: Seconds that compiling adds. draft: Plain
    steps that a draft token takes. reading: Plain steps in which target or draft read a token of a
    prompt. clock: Seconds of all passes. prompts: Lengths of the prompts that were begun.
    """

    def __init__(
        self, plain: float, compiling: float, *, draft: float = 0.3, reading: float = 0.0
    ) -> None:
        self._plain, self._compiling = plain, compiling
        self._draft, self._reading = draft, reading
        self._compiled: set[int] = set()
        self.clock = 0.0
        self.prompts: list[int] = []
        self.surveys: list[Survey] = []

    def seconds(self, drafted: int) -> float:
        """Run a round and return how long it took."""
        compiling = 0.0 if drafted in self._compiled else self._compiling
        self._compiled.add(drafted)
        return self._plain * (1 + self._draft * drafted) + compiling

    def decode(
        self, pair: Pair, survey: Survey, options: Options, prompt: int, *rest: object
    ) -> None:
        """Take the place of `calibrate.decode`."""
        self.surveys.append(survey)
        self.prompts.append(prompt)
        survey.begin_text(prompt)
        a_pass = calibration.PREFILL_STEP * self._reading * self._plain
        for _ in range(0, prompt - 1, calibration.PREFILL_STEP):
            if survey.done or a_pass >= survey.seconds:
                return
            survey.on_prefill(a_pass)
            self.clock += a_pass
        position, unread = 1, prompt
        while not survey.done:
            drafted = survey.choose(options.max_tokens)
            seconds = self.seconds(drafted)
            if drafted:
                seconds += self._draft * self._reading * self._plain * unread
            unread = 0 if drafted else unread + 1
            self.clock += seconds
            survey.on_round(a_round(drafted, 0, seconds, position=position, context=prompt))
            position += 1

    def complete(self, lengths: AutoLength, tokens: int) -> list[int]:
        """Decode a completion, and return the draft length of each round."""
        dice, drafted, position = random.Random(7), list[int](), 0
        lengths.begin(20, 20, tokens)
        while position < tokens:
            drafted.append(lengths.choose(tokens - position))
            accepted = 0
            while accepted < drafted[-1] and dice.random() < ACCEPTED:
                accepted += 1
            seconds = self.seconds(drafted[-1])
            lengths.on_round(a_round(drafted[-1], accepted, seconds, position=position, context=20))
            lengths.meanwhile()
            position += accepted + 1
        return drafted


def lengths_after_the_survey(pair: Pair, device: Device, cache: Path) -> list[list[int]]:
    """Return the draft lengths of three completions after the first survey of a pair. cache: an
    empty directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_SPECDEC_CACHE", str(cache))
        patch.setattr(calibration, "decode", device.decode)
        calibrate_first(pair, OPTIONS)
        completions = []
        for _ in range(3):
            lengths = make_draft_length(pair, drafters(pair, OPTIONS), OPTIONS)
            assert isinstance(lengths, AutoLength)
            completions.append(device.complete(lengths, 200))
            memory(pair, OPTIONS).add(lengths.knowledge)
    return completions


@pytest.mark.parametrize("plain", [0.0015, 0.010, 0.025])
def test_compiling_changes_no_draft_length_after_the_survey(
    pair: Pair, compiles: None, tmp_path: Path, plain: float
) -> None:
    compiled = lengths_after_the_survey(pair, Device(plain, 0.0), tmp_path / "compiled")
    compiling = lengths_after_the_survey(pair, Device(plain, COMPILING), tmp_path / "compiling")
    assert compiling == compiled and all(map(any, compiled))


@pytest.mark.parametrize("cpu", [True, False])
def test_a_few_rounds_come_first_and_off_the_cpu_a_turn_that_only_compiles(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    device = Device(0.001, 0.0)

    def stream(
        pair: Pair, ids: list[int], options: Options, *, draft_length: Survey, **rest: object
    ) -> Iterator[None]:
        while True:
            drafted = draft_length.choose(options.max_tokens)
            draft_length.on_round(a_round(drafted, 0, device.seconds(drafted), context=len(ids)))
            yield None

    monkeypatch.setattr(calibration, "on_cpu", lambda: cpu)
    monkeypatch.setattr(calibration, "decode", device.decode)
    monkeypatch.setattr(calibration, "stream_generate", stream)
    calibrate_first(pair, OPTIONS)
    assert [survey.turns for survey in device.surveys] == ([1, 4] if cpu else [1, 1, 4])
    assert device.prompts == ([1, SHORT] if cpu else [1, SHORT, SHORT])
    device.surveys.clear()
    device.prompts.clear()
    calibrate(pair, turns=2)
    assert [survey.turns for survey in device.surveys] == ([] if cpu else [1, 1])
    assert device.prompts == ([] if cpu else [LONG, SHORT])


@pytest.mark.parametrize("reading", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("draft", [0.1, 0.6, 2.0, 10.0, 100.0])
@pytest.mark.parametrize("plain", [0.0005, 0.002, 0.006, 0.02, 0.05, 0.3, 2.0])
def test_what_is_measured_before_a_text_takes_a_second_at_most(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, plain: float, draft: float, reading: float
) -> None:
    device = Device(plain, 0.0, draft=draft, reading=reading)
    monkeypatch.setattr(calibration, "on_cpu", lambda: True)
    monkeypatch.setattr(calibration, "decode", device.decode)
    calibrate_first(pair, OPTIONS)
    # A slow pair shows that it is slow in its first rounds, in which the draft reads a few tokens.
    slow = plain * (4 + draft * (1 + 4 * reading))
    assert device.clock <= max(SECONDS, slow)
    if plain * (1 + draft) <= 0.006 and draft < 1 and reading < 1:
        assert device.surveys[-1].turns >= LEAST_TURNS
    if plain >= 0.05:
        assert device.prompts == [1]


def test_a_draft_that_is_too_expensive_reads_no_prompt(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(0.001, 0.0, draft=10.0, reading=1.0)
    monkeypatch.setattr(calibration, "decode", device.decode)
    calibrate_first(pair, OPTIONS, [4])
    assert device.prompts == [1] and device.surveys[0].draft_steps > TOO_EXPENSIVE
    lengths = make_draft_length(pair, drafters(pair, OPTIONS), OPTIONS)
    assert isinstance(lengths, AutoLength)
    lengths.begin(20, 20, 200)
    assert not lengths.eager(DRAFT.name)
    assert not any(device.complete(lengths, 200))


def test_a_prompt_is_read_no_further_than_the_time_goes(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds, read = itertools.count(0.0, 0.3), list[int]()
    monkeypatch.setattr(calibration, "clock", lambda: next(seconds))
    run = DecoderOnlyModel.run

    def counted(self: DecoderOnlyModel, tokens: mx.array, *rest: Any) -> Any:
        if self is pair.target:
            read.append(tokens.size)
        return run(self, tokens, *rest)

    assert pair.target.rows_agree and pair.target.batches  # Both run passes.
    monkeypatch.setattr(DecoderOnlyModel, "run", counted)
    survey = calibration.first_survey([DRAFT])
    calibration.decode(pair, survey, OPTIONS, SHORT)
    assert read == [calibration.PREFILL_STEP] * 3 and not survey.turns


def test_a_survey_of_one_turn_is_dropped(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(0.001, 0.0)
    monkeypatch.setattr(calibration, "decode", device.decode)
    for turns in (1, 2):
        survey = Survey([DRAFT], FIRST_LENGTHS, turns=turns)
        monkeypatch.setattr(
            calibration, "first_survey", lambda *rest, survey=survey, **named: survey
        )
        calibrate_first(pair, OPTIONS)
        assert bool(memory(pair, OPTIONS).knowledge) == directory().exists() == (turns == 2)
    [file] = directory().iterdir()
    assert Memory(file).knowledge.keys() == survey.knowledge.keys()


@pytest.mark.parametrize(("plain", "turns"), [(0.010, 4), (0.015, 3), (0.020, 2), (0.040, 0)])
def test_a_survey_ends_with_its_second_or_at_once_if_two_turns_do_not_fit(
    pair: Pair, plain: float, turns: int
) -> None:
    survey, device = calibration.first_survey([DRAFT]), Device(plain, 0.0)
    device.decode(pair, survey, OPTIONS, SHORT)
    assert survey.turns == turns and device.clock <= SECONDS
    if not turns:
        assert device.clock < SECONDS / 2


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
