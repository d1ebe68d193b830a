"""Completions and hidden states for training equal those of single sequences."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import DecodingError
from mlx_specdec.training import completions
from mlx_specdec.training.collect import SampleFiles, collect
from mlx_specdec.training.completions import complete, states
from mlx_specdec.training.config import DataConfig
from mlx_specdec.types import FINAL, after

from ..support.models import make_llama, make_t5
from ..support.simulated_metal import off_cpu

MAKE = {"llama": make_llama, "t5": make_t5}
PROMPTS = [(5, 6, 7), (9, 10, 11, 12, 13, 14), (20,), (30, 31)]
MOST = [24, 9, 40, 17]


@pytest.fixture(scope="module", params=MAKE)
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loading.load(MAKE[request.param](tmp_path_factory.mktemp(request.param)))


def alone(pair: Pair, prompt: Sequence[int], most: int) -> tuple[int, ...]:
    return tuple(generate(pair, list(prompt), Options(max_tokens=most, regular=True)).tokens)


def test_greedy_completions_of_a_batch_are_those_of_single_prompts(pair: Pair) -> None:
    expected = [alone(pair, prompt, most) for prompt, most in zip(PROMPTS, MOST, strict=True)]
    # Some text ends early: its EOS token is the last one.
    ending = expected[2][5]
    pair = dataclasses.replace(pair, eos_token_ids=frozenset({ending}))
    expected = [alone(pair, prompt, most) for prompt, most in zip(PROMPTS, MOST, strict=True)]
    assert any(text[-1] == ending for text in expected)
    assert complete(pair, PROMPTS, MOST, [0.0] * 4, seed=1) == expected


def test_tokens_follow_the_targets_distribution(pair: Pair) -> None:
    """First tokens of many completions at temperature 2 are as frequent as their probability."""
    count, prompt = 4000, PROMPTS[0]
    drawn = complete(pair, [prompt] * count, [1] * count, [2.0] * count, seed=3)
    context = pair.target.open_batch([prompt])
    logits = context.advance(mx.array([pair.target.prefix(prompt)])).logits[0, -1]
    p = np.array(mx.softmax(logits[: pair.vocabulary].astype(mx.float32) / 2))
    found = np.bincount([token for [token] in drawn], minlength=len(p)) / count
    assert np.abs(found - p).sum() / 2 < 3 * np.sqrt(p * (1 - p) / count).sum() / 2


def test_damaged_logits_are_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled = completions._sampled
    monkeypatch.setattr(
        completions, "_sampled", lambda logits, *rest: sampled(logits * mx.nan, *rest)
    )
    with pytest.raises(DecodingError, match="not numbers"):
        complete(pair, PROMPTS, MOST, [0.0] * 4, seed=1)


def test_states_of_a_batch_are_those_of_single_texts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, hidden = [(3, 4, 5), (6,) * 9, (7, 8), (9, 10, 11, 12)], (after(0), FINAL)
    found = list(states(pair, PROMPTS, texts, hidden))
    monkeypatch.setattr(completions, "STATE_TOKENS", 1)
    single = list(states(pair, PROMPTS, texts, hidden))
    for one, other, prompt, text in zip(found, single, PROMPTS, texts, strict=True):
        rows = len(pair.target.prefix(prompt)) + len(text) - 1
        assert one.shape == other.shape == (rows, 2 * pair.target.width)
        assert mx.allclose(one, other, atol=1e-4)


def test_prompts_are_completed_one_by_one_if_a_target_refuses_batches(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pair.target), "why_not_batched", "it is a test")
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    samples, config = [("some words", ""), ("others", "")], DataConfig(length=12)
    collect(pair, samples, config, rows, lambda done, total: None)
    assert all(rows.lengths)


def test_every_temperature_has_texts_among_the_held_out_ones(tmp_path: Path) -> None:
    """Large batches hold texts of one temperature, and lie next to each other."""
    pair = loading.load(make_llama(tmp_path / "model"))
    samples = [(f"some words {number}", "") for number in range(40)]
    config = DataConfig(samples=40, length=12, texts_at_once=20, temperatures=(0.0, 1.0))
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    collect(pair, samples, config, rows, lambda done, total: None)
    train, held_out = rows.split(0.1)
    assert len(held_out) == 4 and sorted([*train, *held_out]) == list(range(40))
    assert sum(held_out < 20) == 2


def test_a_gpu_holds_the_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SampleFiles(tmp_path, 3, mx.bfloat16)
    rows.append([1, 2, 3, 4], mx.arange(12).reshape(4, 3))
    rows.hold()
    from_disk = rows.states(np.array([3, 0, 3]))
    off_cpu(monkeypatch)
    rows.hold()
    (tmp_path / "states.bin").unlink()
    held = rows.states(np.array([3, 0, 3]))
    assert held.dtype == mx.bfloat16 and mx.array_equal(held, from_disk)
