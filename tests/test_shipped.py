"""The heads and drafters in weights/ load with their targets, are small, and save passes.

That they change no text is part of the recorded runs in tests/contract.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .support.shipped import ROOT, prompts

WEIGHTS = ROOT / "weights"
HEADS = ("py-llama-medusa", "t5-enfr-medusa")
DRAFTERS = {"py-llama-dspark": "dspark"}
"""Their kinds."""


@functools.cache
def loaded(name: str) -> Any:
    if name in HEADS:
        return load(WEIGHTS / name)
    return load(WEIGHTS / name.removesuffix(f"-{DRAFTERS[name]}"), WEIGHTS / name)


def size(directory: Path) -> int:
    """In bytes."""
    return sum(file.stat().st_size for file in directory.iterdir())


@pytest.mark.parametrize("name", HEADS)
def test_heads_bring_their_base_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((WEIGHTS / name / "config.json").read_text())
    assert config["base_model_name_or_path"] == f"../{name.removesuffix('-medusa')}"
    pair = load(WEIGHTS / name)
    assert pair.heads is not None and pair.heads.count == 3
    assert not pair.heads.own_output
    assert size(WEIGHTS / name) < 1_000_000


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_drafter_is_recognized_by_its_files_and_small(name: str) -> None:
    speculator = loaded(name).drafter_network
    assert speculator is not None and speculator.kind == DRAFTERS[name]
    assert size(WEIGHTS / name) < 4_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "least"),
    [
        ("py-llama-medusa", "python.jsonl", 2.0),
        ("py-llama-dspark", "python.jsonl", 2.0),
    ],
)
def test_a_greedy_pass_brings_several_tokens(name: str, file: str, least: float) -> None:
    options = Options(max_tokens=40, num_draft=3, proposer=DRAFTERS.get(name), cost_cache=False)
    results = [generate(loaded(name), prompt, options) for prompt in prompts(file, 3)]
    passes = sum(result.stats.target_passes for result in results)
    assert sum(len(result.tokens) for result in results) >= least * passes


# The shipped Python pair writes JSON by schema: all of it valid, with drafts and without.
