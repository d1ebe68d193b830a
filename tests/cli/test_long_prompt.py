"""A prompt longer than what a T5 was trained on is read, with a word about it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from .conftest import Run


@pytest.mark.filterwarnings("default")
def test_a_prompt_beyond_what_the_model_saw_is_read_with_one_line(
    run: Run, t5: Path, tmp_path: Path
) -> None:
    short = Path(shutil.copytree(t5, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "n_positions": 8}))
    asked = ("generate", "Les pates, " * 9, "--draft-model", short, "-m", 9, "--quiet")
    usual = run(*asked, "--model", t5)
    told = run(*asked, "--model", short)
    assert (told.code, told.out) == (0, usual.out) and usual.err == ""
    assert re.fullmatch(
        r"warning: the prompt has \d+ tokens, and the model was trained on 8 at most: the text may "
        r"be worse, and reading the prompt takes about [\d.]+ [kM]B of memory\n",
        told.err,
    )
