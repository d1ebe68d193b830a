"""The heads in weights/ load with their base from anywhere, and never change its text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.pair import Pair
from mlx_specdec.options import Options

from .support.shipped import ROOT, check_passes, check_texts, prompts

SHIPPED = {"py-llama-medusa": "python.jsonl", "t5-enfr-medusa": "translation.jsonl"}


@functools.cache
def loaded(name: str) -> Pair:
    return loading.load(ROOT / "weights" / name)


@pytest.mark.parametrize("name", SHIPPED)
def test_heads_bring_their_base_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = ROOT / "weights" / name
    config = json.loads((directory / "config.json").read_text())
    assert config["base_model_name_or_path"] == f"../{name.removesuffix('-medusa')}"
    pair = loading.load(directory)
    assert pair.heads is not None and pair.heads.count == 3
    assert not pair.heads.own_output
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_is_plain_decodings(name: str) -> None:
    check_texts(loaded(name), prompts(SHIPPED[name], 2), "medusa")


@pytest.mark.slow
def test_python_heads_save_half_of_the_passes() -> None:
    asked = Options(max_tokens=60, num_draft=3, cost_cache=False)
    check_passes(loaded("py-llama-medusa"), prompts("python.jsonl", 4), asked, 2)
