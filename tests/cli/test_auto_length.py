"""--num-draft auto from the command line: what it saves."""

from pathlib import Path

import pytest

from mlx_specdec.draft_length.saved import Memory, directory

from ..support.commands import Run

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
