"""Training data: every completion is the target's own, and hidden states are those of single
sequences."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.engine import loading
from mlx_specdec.engine.pair import Pair
from mlx_specdec.training import collect as collecting
from mlx_specdec.training.collect import SampleFiles, collect, states
from mlx_specdec.training.config import TrainConfig
from mlx_specdec.types import FINAL, after

from ..support.models import make_llama, make_t5

MAKE = {"llama": make_llama, "t5": make_t5}
PROMPTS = [(5, 6, 7), (9, 10, 11, 12, 13, 14), (20,), (30, 31)]


@pytest.fixture(scope="module", params=MAKE)
def pair(request, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loading.load(MAKE[request.param](tmp_path_factory.mktemp(request.param)))


def test_states_of_a_batch_are_those_of_single_texts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, hidden = [(3, 4, 5), (6,) * 9, (7, 8), (9, 10, 11, 12)], (after(0), FINAL)
    pieces = list(zip(PROMPTS, texts, strict=True))
    found = list(states(pair, pieces, hidden))
    monkeypatch.setattr(collecting, "STATE_TOKENS", 1)
    single = list(states(pair, pieces, hidden))
    for one, other, (prompt, text) in zip(found, single, pieces, strict=True):
        rows = len(pair.target.prefix(prompt)) + len(text) - 1
        assert one.shape == other.shape == (rows, 2 * pair.target.width)
        assert mx.allclose(one, other, atol=1e-4)


def test_prompts_are_completed_one_by_one_if_a_target_refuses_batches(
    tmp_path: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(pair.target), "why_not_batched", "it is a test")
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    samples, config = [("some words", ""), ("others", "")], TrainConfig(length=12)
    collect(pair, samples, config, rows, lambda done, total: None)
    assert all(rows.lengths)


def test_equal_prompts_get_completions_of_every_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "TEMPERATURES", (0.0, 1.0))
    pair = loading.load(make_llama(tmp_path / "model"))
    samples, config = [("some words", "")] * 40, TrainConfig(length=12)
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    collect(pair, samples, config, rows, lambda done, total: None)
    texts = [*map(tuple, rows.texts())]
    assert len({*texts[::2]}) == 1 and len({*texts[1::2]}) > 10
    train, held_out = rows.split(0.1)
    assert [*train, *held_out] == [*range(len(texts))]
    assert len(held_out) == len(texts) // 10
