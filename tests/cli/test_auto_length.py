"""--num-draft auto from the command line: what it saves, what it says, how it is calibrated."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.draft_length.auto import AutoLength, CostTable
from mlx_specdec.draft_length.saved import Memory, directory
from mlx_specdec.engine.opening import pair_key
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.measure import calibrate as calibration
from mlx_specdec.measure.calibrate import TURNS, calibrate_first
from mlx_specdec.options import Options

from ..support.commands import Run
from ..support.families import model_of
from ..support.lengths import run as run_rounds
from ..support.pairs import decoder_only, pair_of

PROMPT = "Les pates a midi"


@pytest.fixture
def kept() -> Path:
    return directory()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each turn of a calibration before a completion or a batch."""
    turns: list[int] = []

    def decode(
        pair: Pair, options: Options, scratch: Memory, lengths: Sequence[int], rows: int, *_: Any
    ) -> bool:
        turns.append(rows)
        drafter = calibration._source(pair, options)
        survey = calibration.Survey(AutoLength([drafter], scratch), lengths)
        run_rounds(survey, len(lengths), lambda n: 1 + 0.2 * n, lambda number: 0, rows)
        return True

    monkeypatch.setattr(calibration, "_decode", decode)
    return turns


def test_a_text_keeps_what_its_rounds_cost_unless_switched_off(
    run: Run, t5: Path, kept: Path
) -> None:
    model = ("generate", PROMPT, "--model", t5)
    arguments = (*model, "--draft-model", t5, "--proposer", "draft", "--num-draft", "auto")
    endless = ("-m", 60, "--logit-bias", "1=-1e9")
    plain = run(*model, *endless, "--regular-decode")
    assert run(*arguments, *endless, "--no-cache").out == plain.out
    assert not kept.exists()
    assert run(*arguments, *endless).out == plain.out
    saved._write_all()
    [file] = kept.iterdir()
    assert any(name.startswith("acceptance") for name in Memory(file).entries)
    assert run(*arguments, *endless).out == plain.out


def test_a_long_text_of_a_new_pair_measures_what_rounds_cost_and_no_later_one_does(
    run: Run, t5: Path, t5_draft: Path, watched: list[int]
) -> None:
    arguments = ("generate", PROMPT, "--model", t5, "--draft-model", t5_draft)
    measured = []
    for flags in (("-m", 600, "--num-draft", 3), ("-m", 600), ("-m", 600)):
        assert run(*arguments, *flags).code == 0
        measured.append(len(watched))
    assert measured == [0, TURNS, TURNS]


def test_a_file_measures_what_rounds_of_its_batches_cost(
    run: Run, t5: Path, t5_draft: Path, tmp_path: Path, watched: list[int]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n" * 20)
    arguments = ("batch", prompts, "--model", t5, "--draft-model", t5_draft, "--quiet")
    for _ in range(2):
        options = ("--batch-size", 4, "--output", tmp_path / "texts.jsonl", "--overwrite")
        assert run(*arguments, *options).code == 0
    assert watched == [4] * TURNS


@pytest.mark.parametrize("cpu", [True, False])
def test_each_length_runs_once_before_it_is_timed_on_a_device_that_compiles(
    watched: list[int], monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    monkeypatch.setattr(calibration, "on_cpu", lambda: cpu)
    pair, options = decoder_only("llama"), Options(num_draft="auto")
    calibrate_first(pair, options, [4])
    assert watched == [rows for rows in (1, 4) for _ in range(TURNS + (not cpu))]
    costs = calibration._source(pair, options).costs
    table = CostTable(saved.memory(pair_key(pair)), 4, 0, [costs])
    assert table.entry(costs, 8)[0] == pytest.approx(0.955, abs=0.01)
    assert table.entry(costs, 8)[1] > TURNS - 1.1


def test_a_turn_ends_before_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "TOO_EXPENSIVE", 1e3)
    pair, options = decoder_only("llama"), Options(num_draft="auto")
    ended, rounds, now = [], [], calibration.time.perf_counter
    for began, bounds in (
        (now(), (math.inf, math.inf)),
        (now() - 1, (0.5, math.inf)),
        (now(), (math.inf, 1e-6)),
    ):
        memory = Memory()
        turn = (pair, options, memory, calibration.FIRST_TURN, 1, began)
        ended.append(calibration._decode(*turn, *bounds))
        rounds.append(sum(memory.rounds.values()))
    assert ended == [True, False, False]
    assert rounds[0] >= 8 and rounds[1] == 0 and rounds[2] <= 3


def test_a_turn_ends_if_drafting_is_too_expensive(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, options, memory = decoder_only("llama"), Options(num_draft="auto"), Memory()
    monkeypatch.setattr(calibration, "TOO_EXPENSIVE", -1.0)
    assert not calibration._decode(pair, options, memory, calibration.FIRST_TURN)
    assert max(drafted for _, drafted, _ in memory.rounds) == 1


def test_too_little_work_is_not_measured_for(watched: list[int]) -> None:
    pair, options = decoder_only("llama"), Options(num_draft="auto")
    calibrate_first(pair, options, [4], 1_000)
    assert not watched
    calibrate_first(pair, options, [4], 4_000)
    assert watched == [4] * TURNS


@pytest.mark.slow
def test_calibration_measures_every_length_and_keeps_it(
    run: Run, t5: Path, t5_draft: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TOO_EXPENSIVE", 1e3)
    done = run("calibrate", "--model", t5, "--draft-model", t5_draft, "--turns", 2)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == [str(n) for n in range(1, 17)]
    saved._write_all()
    known = Memory(next(kept.iterdir())).entries
    assert any("1 rows, 0 doublings" in name for name in known)
    assert str(kept) in done.err


def test_without_a_draft_rounds_of_lookup_are_measured(
    run: Run, t5: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "TOO_EXPENSIVE", 1e3)
    done = run("calibrate", "--model", t5, "--turns", 2)
    assert done.code == 0 and len(done.out.splitlines()) == 16
    saved._write_all()
    known = Memory(next(kept.iterdir())).entries
    assert all(weight > 1 for _, weight in known["costs of free, 1 rows, 0 doublings"][1:])


def test_a_target_that_is_decoded_without_drafts_is_not_calibrated() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(OptionError, match="without drafts"):
        calibration.calibrate(pair_of(model_of("phi3small"), None))


def test_too_few_turns_are_reported(run: Run, t5: Path) -> None:
    for turns in (0, 1):
        wrong = run("calibrate", "--model", t5, "--turns", turns)
        assert wrong.code == 2 and "'--turns': it must be greater than or equal to 2" in wrong.err
