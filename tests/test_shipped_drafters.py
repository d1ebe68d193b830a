"""The drafters on hidden states in weights/ load with their targets, and never change a text."""

from __future__ import annotations

import functools
import itertools
import json

import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.drafters.kinds import read
from mlx_specdec.options import Options

from .support.shipped import ROOT, check_passes, check_texts, prompts

SHIPPED = {
    "py-llama-dspark": ("dspark", "python.jsonl", 2.0),
    "t5-enfr-eagle3": ("eagle3", "translation.jsonl", 1.2),
}
"""Their kind, prompts for their target, and the least number of greedy tokens a pass."""


@functools.cache
def loaded(name: str) -> Pair:
    kind, _, _ = SHIPPED[name]
    target = ROOT / "weights" / name.removesuffix(f"-{kind}")
    return loading.load(target, ROOT / "weights" / name)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_drafter_is_told_by_its_files_and_small(name: str) -> None:
    speculator = loaded(name).speculator
    assert speculator is not None and speculator.kind == SHIPPED[name][0]
    files = (ROOT / "weights" / name).iterdir()
    assert sum(file.stat().st_size for file in files) < 4_000_000


def test_each_is_refused_for_the_others_target() -> None:
    """Their widths and vocabularies are the same."""
    for name, other in itertools.permutations(SHIPPED):
        files = read(ROOT / "weights" / name)
        assert files is not None
        target = ROOT / "weights" / other.removesuffix(f"-{SHIPPED[other][0]}")
        with pytest.raises(CheckpointError, match="the drafter belongs to another target"):
            files.check_config(json.loads((target / "config.json").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_is_plain_decodings(name: str) -> None:
    kind, file, _ = SHIPPED[name]
    check_texts(loaded(name), prompts(file, 2), kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_drafter_saves_passes(name: str) -> None:
    kind, file, least = SHIPPED[name]
    asked = Options(max_tokens=40, num_draft=3, proposer=kind, cost_cache=False)
    check_passes(loaded(name), prompts(file, 3), asked, least)
