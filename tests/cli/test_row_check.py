"""A target that cannot be speculated with says so in one line, and decodes plainly."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.text.tokenizer import load_tokenizer

from ..support import tiny
from ..support.commands import Run
from ..support.families import config_of
from ..support.tokenizers import byte_level


@pytest.mark.filterwarnings("default")
def test_a_target_whose_rows_differ_is_told_in_one_line(tmp_path: Path, run: Run) -> None:
    size = load_tokenizer(byte_level(tmp_path), kind="decoder-only").size
    config = {**config_of("plamo3"), "vocab_size": size}
    weights = dict(tree_flatten(tiny.from_config(config).parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = ("speculative decoding of text", "--model", tmp_path, "-m", 30, "--quiet")
    plain = run("generate", *asked, "--regular-decode")
    assert plain.code == 0 and plain.err == ""
    drafted = run("generate", *asked, "--proposer", "ngram", "--ngram-min", 1, "--num-draft", 4)
    assert drafted.out == plain.out
    assert drafted.err == (
        "warning: mlx-lm's plamo3 models give several tokens at once other scores than one after "
        "the other: decoding without speculation\n"
    )
