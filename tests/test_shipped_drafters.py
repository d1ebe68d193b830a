"""The drafters on hidden states in weights/ load with their targets, and never change a text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mlx_specdec import assemble
from mlx_specdec.assemble import Pair, generate
from mlx_specdec.options import Options

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {
    "py-llama-dspark": ("dspark", "python.jsonl", 2.0),
    "t5-enfr-eagle3": ("eagle3", "translation.jsonl", 1.2),
}
"""Their kind, prompts for their target, and the least number of greedy tokens a pass."""


@functools.cache
def loaded(name: str) -> Pair:
    kind, _, _ = SHIPPED[name]
    target = ROOT / "weights" / name.removesuffix(f"-{kind}")
    return assemble.load(target, ROOT / "weights" / name)


def prompts(name: str, count: int) -> list[str]:
    lines = (ROOT / "prompts" / SHIPPED[name][1]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_drafter_is_told_by_its_files_and_small(name: str) -> None:
    speculator = loaded(name).speculator
    assert speculator is not None and speculator.kind == SHIPPED[name][0]
    files = (ROOT / "weights" / name).iterdir()
    assert sum(file.stat().st_size for file in files) < 4_000_000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_is_plain_decodings(name: str, temperature: float) -> None:
    pair = loaded(name)
    for seed, prompt in enumerate(prompts(name, 2)):
        asked = {"max_tokens": 20, "temperature": temperature, "seed": seed, "cost_cache": False}
        plain = generate(pair, prompt, Options(**asked, regular=True))
        result = generate(pair, prompt, Options(**asked, num_draft=3))
        assert (result.tokens, result.labels.proposer) == (plain.tokens, SHIPPED[name][0])


@pytest.mark.parametrize("name", SHIPPED)
def test_a_drafter_saves_passes(name: str) -> None:
    kind, _, least = SHIPPED[name]
    asked = Options(max_tokens=40, num_draft=3, proposer=kind, cost_cache=False)
    results = [generate(loaded(name), prompt, asked) for prompt in prompts(name, 3)]
    passes = sum(result.stats.target_passes for result in results)
    assert sum(len(result.tokens) for result in results) >= least * passes
