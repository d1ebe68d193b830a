"""--num-draft auto from the command line: what it keeps, what it says, how it is calibrated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.draft_length import saved
from mlx_specdec.draft_length.auto_length import Source
from mlx_specdec.draft_length.costs import unknown
from mlx_specdec.draft_length.saved import Knowledge, Memory, costs_of, directory
from mlx_specdec.errors import OptionError
from mlx_specdec.measure import calibrate as calibration
from mlx_specdec.measure.calibrate import OF_BATCH, SHORT, Survey, first_survey

from ..support.commands import Run
from ..support.families import model_of
from ..support.pairs import pair_of

PROMPT = "Les pates a midi"


@pytest.fixture
def kept() -> Path:
    return directory()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No survey is left out because the machine is busy."""
    monkeypatch.setattr(calibration, "SECONDS", 1e3)
    monkeypatch.setattr(calibration, "TOO_EXPENSIVE", 1e3)


def test_a_text_keeps_what_its_rounds_cost_unless_switched_off(
    run: Run, t5: Path, kept: Path
) -> None:
    # Whatever this machine's times make of it, a round of three tokens comes first.
    model = ("generate", PROMPT, "--model", t5)
    arguments = (*model, "--draft-model", t5, "--proposer", "draft", "--num-draft", "auto")
    endless = ("-m", 60, "--logit-bias", "1=-1e9")
    plain = run(*model, *endless, "--regular-decode")
    assert run(*arguments, *endless, "--no-cache").out == plain.out
    assert not kept.exists()
    assert run(*arguments, *endless).out == plain.out
    saved._write_all()
    [file] = kept.iterdir()
    known = Memory(file).knowledge
    assert sorted(name.split()[0] for name in known) == ["budget", "costs", "costs", "counts"]
    assert run(*arguments, *endless).out == plain.out


def test_the_first_long_text_of_a_pair_measures_what_rounds_cost_and_no_later_one_does(
    run: Run, t5: Path, t5_draft: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveys = watched(monkeypatch)
    arguments = ("generate", PROMPT, "--model", t5, "--draft-model", t5_draft)
    measured = []
    for flags in (("-m", 12), ("--num-draft", 3), ("--no-cache",), (), ()):
        assert run(*arguments, *flags).code == 0
        measured.append(len(surveys))
    assert measured == [0, 0, 0, 1, 1] and len(list(kept.iterdir())) == 1


def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each calibration before a text or a batch."""
    rows: list[int] = []

    def survey(sources: Sequence[Source], size: int, known: Knowledge, **limits: Any) -> Survey:
        rows.append(size)
        return first_survey(sources, size, known, **limits)

    monkeypatch.setattr(calibration, "first_survey", survey)
    return rows


def test_a_file_measures_what_rounds_of_its_batches_cost(
    run: Run, t5: Path, t5_draft: Path, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, read = watched(monkeypatch), []
    monkeypatch.setattr(Survey, "begin_text", lambda survey, prompt: read.append(prompt))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n" * 3)
    arguments = ("batch", prompts, "--model", t5, "--draft-model", t5_draft, "--quiet")
    for _ in range(2):
        assert run(*arguments, "--output", tmp_path / "texts.jsonl", "--overwrite").code == 0
    # What reading costs is measured with a single text.
    assert rows == [1, 3] and [prompt for prompt in read if prompt > 1] == [SHORT, OF_BATCH]
    saved._write_all()
    known = Memory(next(kept.iterdir())).knowledge
    sources = {name.split(" ", 2)[2] for name in known if name.startswith("costs")}
    assert "free" in sources and all(costs_of(known, name).keys() >= {1, 4} for name in sources)


@pytest.mark.slow
def test_calibration_measures_every_length_and_keeps_it(
    run: Run, t5: Path, t5_draft: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "NOISY", 10.0)
    done = run("calibrate", "--model", t5, "--draft-model", t5_draft, "--turns", 4)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == [str(n) for n in range(1, 17)]
    known = Memory(next(kept.iterdir())).knowledge
    assert [name.split(" ", 2)[:2] for name in known] == [["costs", "1"]] * 2
    assert str(kept) in done.err


def test_a_noisy_machine_is_refused_and_what_was_known_stays(
    run: Run, t5: Path, t5_draft: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("calibrate", "--model", t5, "--draft-model", t5_draft, "--turns", 2)
    monkeypatch.setattr(calibration, "NOISY", 10.0)
    assert run(*arguments).code == 0
    before = {file: file.read_bytes() for file in kept.iterdir()}
    assert before
    monkeypatch.setattr(calibration, "NOISY", 0.0)
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "too noisy" in done.err and str(kept) in done.err and done.err.count("\n") == 1
    assert {file: file.read_bytes() for file in kept.iterdir()} == before


@pytest.mark.parametrize("cpu", [True, False])
def test_without_a_draft_rounds_of_lookup_are_measured(
    run: Run, t5: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, cpu: bool
) -> None:
    monkeypatch.setattr(calibration, "on_cpu", lambda: cpu)
    monkeypatch.setattr(calibration, "NOISY", 10.0)
    done = run("calibrate", "--model", t5, "--turns", 2)
    assert done.code == 0 and len(done.out.splitlines()) == 16
    known = Memory(next(kept.iterdir())).knowledge
    assert list(known) == ["costs 1 free"]
    assert (costs_of(known, "free")[1].covariance[:16, :16] != unknown().covariance[:16, :16]).all()


def test_a_target_that_is_decoded_without_drafts_is_not_calibrated() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(OptionError, match="without drafts"):
        calibration.calibrate(pair_of(model_of("plamo3"), None))


def test_too_few_turns_are_reported(run: Run, t5: Path) -> None:
    for turns in (0, 1):
        wrong = run("calibrate", "--model", t5, "--turns", turns)
        assert wrong.code == 2 and "'--turns': it must be greater than or equal to 2" in wrong.err
