"""Models whose passes over several rows mean something else are decoded plainly, with a word."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.engine.generate import generate, stream_generate
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm import model as decoder_only
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.trials import rows_agree
from mlx_specdec.options import Options
from mlx_specdec.proposers.lookup import PromptLookup

from ..support import tiny
from ..support.families import config_of, model_of
from ..support.pairs import PROMPT, pair_of

WRONG = ("phi3small", "plamo3")


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
@pytest.mark.parametrize("name", WRONG)
def test_the_two_families_that_are_wrong_are_told_once(name: str, dtype: mx.Dtype) -> None:
    model = model_of(name, dtype)
    with pytest.warns(RuntimeWarning, match=f"mlx-lm's {name} models") as caught:
        assert not model.rows_agree
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not model.rows_agree
    assert len(caught) == 1


@pytest.mark.parametrize("window", [1, 3, 100, 4096])
def test_a_window_of_any_width_is_passed(window: int) -> None:
    with pytest.warns(RuntimeWarning):
        assert not model_of("plamo3", window_size=window).rows_agree
    assert model_of("gpt_oss", sliding_window=max(window, 2)).rows_agree


@pytest.mark.parametrize("window", [1 << 20, 1 << 31, 10**20])
def test_a_window_wider_than_memory_costs_nothing(window: int) -> None:
    network = tiny.from_config(config_of("llama"))
    assert DecoderOnlyModel(network, caches=CacheSettings(max_size=window)).rows_agree
    assert mx.get_peak_memory() < 1 << 30


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_a_proposer_of_the_callers_own_is_not_asked() -> None:
    pair = pair_of(model_of("plamo3"), None)
    plain = generate(pair, PROMPT, Options(max_tokens=40, regular=True))
    run = stream_generate(pair, PROMPT, Options(max_tokens=40), proposer=PromptLookup())
    assert run.result().tokens == plain.tokens
    assert run.result().stats.drafted == 0 and run.result().labels.proposer == "none"


def test_phi3small_with_ids_that_mlx_lm_writes_past_is_refused(tmp_path: Path) -> None:
    config = {**config_of("phi3small"), "vocab_size": tiny.VOCABULARY}
    network = tiny.from_config(config)
    weights = dict(tree_flatten(network.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"masks token ids up to 100351 .* vocabulary of 64"):
        load_model(tmp_path)


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The types of the models whose passes were compared."""
    kinds: list[str] = []

    def compare(model: DecoderOnlyModel, entries: list) -> bool:
        kinds.append(type(model.network).__module__.rpartition(".")[2])
        return rows_agree(model, entries)

    monkeypatch.setattr(decoder_only, "rows_agree", compare)
    return kinds


def test_a_model_that_agrees_is_compared_once_by_what_its_passes_depend_on(
    compared: list[str], tmp_path: Path
) -> None:
    directory = tiny.write("llama", tmp_path)

    def agrees(**settings: object) -> bool:
        return load_model(directory, **settings).model.rows_agree

    assert agrees() and agrees() and compared == ["llama"]
    assert agrees(dtype="bfloat16") and agrees(caches=CacheSettings(max_size=16))
    assert len(compared) == 3
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    assert agrees() and len(compared) == 4
    assert agrees() and len(compared) == 4


def test_a_model_that_disagrees_is_told_of_every_time(compared: list[str], tmp_path: Path) -> None:
    network = tiny.from_config(config_of("plamo3"))
    mx.save_safetensors(
        str(tmp_path / "model.safetensors"), dict(tree_flatten(network.parameters()))
    )
    (tmp_path / "config.json").write_text(json.dumps(config_of("plamo3")))
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="plamo3 models"):
            assert not load_model(tmp_path).model.rows_agree
    assert compared == ["plamo3", "plamo3"]


def test_where_nothing_can_be_kept_models_are_compared_all_the_same(
    compared: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.write("llama", tmp_path / "llama")
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert load_model(directory).model.rows_agree
    assert compared == ["llama", "llama"]
