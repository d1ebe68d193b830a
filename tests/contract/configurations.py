"""Checkpoints of tests/fixtures/configurations, with weights that are drawn by name."""

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tokenizers import Tokenizer, models

from mlx_specdec import Options, Request, stream_many

CASES = Path(__file__).parents[1] / "fixtures" / "configurations"
PROMPTS = ([5, 9, 40, 41, 42, 7], [11 + (7 * i * i + 3 * i) % 80 for i in range(26)])
LENGTH = 6


def drawn(name: str, shape: tuple[int, ...], wide: bool) -> np.ndarray:
    """Return the weight of a tensor, float32, as `benchmarks/make_configurations.py` draws it."""
    random = np.random.default_rng(zlib.crc32(name.encode()))
    normal = np.asarray(random.standard_normal(shape), np.float32)
    if len(shape) > 1:
        width = np.prod(shape[1:]) if len(shape) < 3 else shape[-1]
        return normal * np.float32(1.5 / np.sqrt(width))
    scale = 8.0 if wide and name.startswith("model.norm.") else 1.0
    drawn = 0.3 * normal + ("norm" in name and "bias" not in name)
    return np.asarray(scale * drawn, np.float32)


def written(case: dict[str, Any], directory: Path) -> Path:
    """Write a checkpoint as transformers saves it."""
    (directory / "config.json").write_text(json.dumps(case["config"]))
    wide = "wide" in case
    weights = {name: mx.array(drawn(name, tuple(s), wide)) for name, s in case["shapes"].items()}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "pt"})
    text = case["config"].get("text_config", case["config"])
    words = {f"w{number}": number for number in range(text["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    return directory


def prompts_of(case: dict[str, Any]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """Yield the prompts of a case, and the tokens and log-probabilities of transformers."""
    yield from zip(PROMPTS, case["outputs"], strict=False)


def compare(pair: Any, prompt: list[int], expected: dict[str, Any], **options: Any) -> float:
    """Return the largest difference of log-probabilities; check that the tokens are equal."""
    settings = Options(max_tokens=LENGTH, cost_cache=False, **{"regular": True, **options})
    request = Request(prompt, settings, top_logprobs=0, ignore_eos=True)
    scores, tokens = list[float](), tuple[int, ...]()
    for part in stream_many(pair, [request]):
        assert part.error is None, part.error
        scores += [token.logprob for token in part.logprobs]
        tokens = tokens if part.result is None else part.result.tokens
    assert list(tokens) == expected["tokens"]
    return max(abs(a - b) for a, b in zip(scores, expected["logprobs"], strict=True))


def largest_difference(case: dict[str, Any]) -> float:
    """Return how much the tested key changes a log-probability before tokens part."""
    largest = 0.0
    for one, other in zip(case["outputs"], case["neutral"], strict=True):
        rows = zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True)
        for token, plain, score, neutral in rows:
            largest = max(largest, abs(score - neutral))
            if token != plain:
                break
    return largest
