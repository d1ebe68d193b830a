"""What Medusa heads learn from, and what fresh ones say."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.pair import Pair
from mlx_specdec.models.base import Base
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.training import collect as collecting
from mlx_specdec.training.collect import SampleFiles, TrainingSample, collect
from mlx_specdec.training.config import TrainConfig
from mlx_specdec.training.medusa import initial_heads

from ..support import tiny
from ..support.models import make_llama, make_t5
from ..support.pairs import FIXTURES

TEXTS = ["some words", "other words than these", "words again and again"]


@pytest.fixture(scope="module", params=["llama", "t5"])
def model(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = make_llama if request.param == "llama" else make_t5
    return make(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def pair(model: Path) -> Pair:
    return loading.load(model)


def rows_of(
    pair: Pair, tmp_path: Path, samples: list[TrainingSample]
) -> tuple[SampleFiles, list[list[int]]]:
    tmp_path.mkdir(exist_ok=True)
    rows = SampleFiles(tmp_path, pair.target.width, pair.target.state_dtype)
    collect(pair, samples, TrainConfig(length=48), rows, lambda done, total: None)
    tokens = np.fromfile(tmp_path / "tokens.bin", np.int32).tolist()
    ends = np.cumsum(rows.lengths).tolist()
    return rows, [tokens[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def test_texts_are_the_models_own_and_each_state_predicts_its_token(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "TEMPERATURES", (0.0,))
    prompts = [pair.tokenizer.encode(text) for text in TEXTS]
    rows, found = rows_of(pair, tmp_path, [(text, "") for text in TEXTS])
    every = rows.states(np.arange(int(rows.lengths.sum())))
    best = mx.argmax(pair.target.head(every[None])[0], axis=-1).tolist()
    assert best == [token for text in found for token in text]
    for prompt, text in zip(prompts, found, strict=True):
        again = generate(pair, prompt, Options(max_tokens=len(text), regular=True))
        assert list(again.tokens) == text


@pytest.fixture(scope="module")
def base() -> Base:
    return DecoderOnlyModel(tiny.build("llama"))


@pytest.mark.parametrize("own_output", [True, False])
def test_fresh_heads_say_what_the_base_says(own_output: bool, base: Base) -> None:
    scaled = load_model(FIXTURES / "tied-scaled-relu", dtype="float32").model
    for model in (base, scaled):
        heads = initial_heads(model, 2, 2, own_output=own_output)
        state = mx.random.normal((1, 1, model.width), key=mx.random.key(2))
        logits = heads.logits(state, 2)
        expected = model.head(state)
        assert mx.allclose(logits, mx.repeat(expected, 2, axis=1), atol=1e-5)
