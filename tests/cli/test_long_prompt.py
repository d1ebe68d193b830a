"""A prompt longer than what a T5 was trained on is read, with a word about it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from mlx_specdec.checkpoints import disk as sizes

from ..support.batches import records, write
from ..support.commands import Run, told


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


@pytest.mark.filterwarnings("default")
def test_a_prompt_beyond_the_memory_is_refused_before_it_is_read(
    run: Run, t5: Path, tmp_path: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 20 million tokens are for any machine; of a batch one line is an error."""
    memory = (t5 / "model.safetensors").stat().st_size + 50_000_000
    monkeypatch.setattr("mlx_specdec.checkpoints.disk.memory", lambda: memory)
    long = "Les pates, " * 20_000
    told(
        run("generate", long, "--model", t5),
        "the prompt has",
        "reading the prompt takes about",
        f"models may take {sizes.show(int(0.9 * memory))} on this machine: shorten it",
    )
    file = write(tmp_path / "in.txt", ["les pates", long])
    done = run("batch", file, "-o", output, "--model", t5, "-m", 3)
    assert done.code == 1
    first, second = records(output)
    assert "text" in first and "shorten it" in second["error"]
