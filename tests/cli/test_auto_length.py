"""--num-draft auto from the command line: what it saves, what it says, how it is calibrated."""

from pathlib import Path

import pytest

from mlx_specdec.draft_length.saved import Memory, directory
from mlx_specdec.errors import OptionError
from mlx_specdec.measure import calibrate as calibration

from ..support.commands import Run
from ..support.families import model_of
from ..support.pairs import pair_of

PROMPT = "Les pates a midi"


@pytest.fixture
def kept() -> Path:
    return directory()


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
    [file] = kept.iterdir()
    assert any(name.startswith("acceptance") for name in Memory(file).entries)
    assert run(*arguments, *endless).out == plain.out


@pytest.mark.slow
def test_calibration_measures_every_length_and_keeps_it(
    run: Run, t5: Path, t5_draft: Path, kept: Path
) -> None:
    done = run("calibrate", "--model", t5, "--draft-model", t5_draft, "--turns", 2)
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines()] == [str(n) for n in range(1, 17)]
    known = Memory(next(kept.iterdir())).entries
    assert any("1 rows, 0 doublings" in name for name in known)
    assert str(kept) in done.err


def test_every_draft_length_of_a_decoder_only_pair_is_timed(
    run: Run, llama: Path, kept: Path
) -> None:
    assert run("calibrate", "--model", llama, "--draft-model", llama, "--turns", 2).code == 0
    known = Memory(next(kept.iterdir())).entries
    [timed] = [known[name] for name in known if f"costs of {llama}" in name]
    assert all(weight > 1 for _, weight in timed[1:])


def test_without_a_draft_rounds_of_lookup_are_measured(run: Run, t5: Path, kept: Path) -> None:
    done = run("calibrate", "--model", t5, "--turns", 2)
    assert done.code == 0 and len(done.out.splitlines()) == 16
    known = Memory(next(kept.iterdir())).entries
    assert all(weight > 1 for _, weight in known["costs of free, 1 rows, 0 doublings"][1:])


def test_a_target_that_is_decoded_without_drafts_is_not_calibrated() -> None:
    with pytest.warns(RuntimeWarning), pytest.raises(OptionError, match="without drafts"):
        calibration.calibrate(pair_of(model_of("phi3small"), None))


def test_too_few_turns_are_reported(run: Run, t5: Path) -> None:
    for turns in (0, 1):
        wrong = run("calibrate", "--model", t5, "--turns", turns)
        assert wrong.code == 2 and "'--turns': it must be greater than or equal to 2" in wrong.err
