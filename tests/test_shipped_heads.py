"""The heads in weights/ load with their base from anywhere, and never change its text."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from mlx_specdec import assemble
from mlx_specdec.assemble import Pair, generate
from mlx_specdec.options import Options

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"py-llama-medusa": "python.jsonl", "t5-enfr-medusa": "translation.jsonl"}


@functools.cache
def loaded(name: str) -> Pair:
    return assemble.load(ROOT / "weights" / name)


def prompts(name: str, count: int) -> list[str]:
    lines = (ROOT / "prompts" / SHIPPED[name]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[:: len(lines) // count]][:count]


@pytest.mark.parametrize("name", SHIPPED)
def test_heads_bring_their_base_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = ROOT / "weights" / name
    config = json.loads((directory / "config.json").read_text())
    assert config["base_model_name_or_path"] == f"../{name.removesuffix('-medusa')}"
    pair = assemble.load(directory)
    assert pair.heads is not None and pair.heads.count == 3
    assert not pair.heads.own_output
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SHIPPED)
def test_the_text_is_plain_decodings(name: str, temperature: float) -> None:
    pair = loaded(name)
    for seed, prompt in enumerate(prompts(name, 2)):
        asked = {"max_tokens": 20, "temperature": temperature, "seed": seed, "cost_cache": False}
        plain = generate(pair, prompt, Options(**asked, regular=True))
        result = generate(pair, prompt, Options(**asked, num_draft=3))
        assert (result.tokens, result.labels.proposer) == (plain.tokens, "medusa")
        assert result.stats.drafted > 0


@pytest.mark.slow
def test_python_heads_save_half_of_the_passes() -> None:
    pair = loaded("py-llama-medusa")
    asked = Options(max_tokens=60, num_draft=3, cost_cache=False)
    results = [generate(pair, prompt, asked) for prompt in prompts("py-llama-medusa", 4)]
    passes = sum(result.stats.target_passes for result in results)
    assert sum(len(result.tokens) for result in results) >= 2 * passes
