"""What tests of the drafters and heads in weights/ share."""

from __future__ import annotations

import json
from pathlib import Path

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.options import Options

ROOT = Path(__file__).resolve().parents[2]


def prompts(file: str, count: int) -> list[str]:
    """So many of a file in prompts/, from all over it."""
    lines = (ROOT / "prompts" / file).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]


def check_texts(pair: Pair, asked: list[str], proposer: str) -> None:
    """That texts are plain decoding's own, every other one greedy, and that this proposer drafted
    them."""
    for seed, prompt in enumerate(asked):
        temperature = float(seed % 2)
        same = {"max_tokens": 20, "temperature": temperature, "seed": seed, "cost_cache": False}
        plain = generate(pair, prompt, Options(**same, regular=True))
        result = generate(pair, prompt, Options(**same, num_draft=3))
        assert (result.tokens, result.labels.proposer) == (plain.tokens, proposer)
        assert result.stats.drafted > 0


def check_passes(pair: Pair, asked: list[str], options: Options, least: float) -> None:
    """That a target pass brings at least so many tokens."""
    results = [generate(pair, prompt, options) for prompt in asked]
    passes = sum(result.stats.target_passes for result in results)
    assert sum(len(result.tokens) for result in results) >= least * passes
