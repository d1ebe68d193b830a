"""Our networks' weights under the checkpoints' names; real files, no torch."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.measure.transformers_baseline import NoBaselineError, build, settings, weights
from mlx_specdec.models.loading import load_model

from ..support.fake_hugging_face import FakeHuggingFace, FakeModel

FIXTURES = Path(__file__).parents[1] / "fixtures"
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
TIED = (*COPIES, "lm_head.weight")


def network(name: str, **asked: int):
    return load_model(FIXTURES / name, dtype="float32", **asked).model.network


def stored(name: str) -> dict[str, np.ndarray]:
    read = mx.load(str(FIXTURES / name / "model.safetensors"))
    return {key: np.array(array.astype(mx.float32)) for key, array in read.items()}


def shapes(given: dict[str, np.ndarray], copies: tuple[str, ...] = ()) -> dict:
    table = given.get("shared.weight")
    return {
        **{name: array.shape for name, array in given.items()},
        **{name: table.shape for name in copies if table is not None},
    }


@pytest.mark.parametrize(
    "name", ["t5/own-head-scaled", "t5/tied-unscaled", "t5/umt5-untied", "torch/llama"]
)
def test_weights_have_the_names_and_values_that_transformers_saved(name: str) -> None:
    found, saved = weights(network(name)), stored(name)
    assert found.keys() == saved.keys()
    assert all(np.array_equal(found[key], saved[key]) for key in found)


def test_packed_weights_come_unpacked() -> None:
    found, saved = weights(network("torch/llama", q_bits=8, q_group_size=32)), stored("torch/llama")
    assert shapes(found) == shapes(saved)
    assert all(array.dtype == np.float32 for array in found.values())
    for key, array in found.items():
        assert np.abs(array - saved[key]).max() < 0.02 * np.abs(saved[key]).max()


@pytest.mark.parametrize(
    ("name", "scales"), [("own-head-scaled", True), ("tied-unscaled", False), ("mt5", False)]
)
def test_the_scaling_is_said_where_transformers_looks_for_it(name: str, scales: bool) -> None:
    config = {
        **files.read_config(FIXTURES / "t5" / name),
        "quantization": {"bits": 4, "group_size": 64},
        "auto_map": {"AutoModel": "code.Model"},
    }
    told = settings(config, network(f"t5/{name}"))
    assert told["tie_word_embeddings"] is scales
    assert not told.keys() & {"quantization", "auto_map", "scale_decoder_outputs"}


def test_all_weights_are_given_to_a_model_of_the_same_configuration() -> None:
    name = "t5/own-head-scaled"
    ours = network(name)
    given = weights(ours)
    fake = FakeHuggingFace(FakeModel(shapes(given, COPIES), TIED))
    model = build(fake.installed, files.read_config(FIXTURES / name), ours)
    assert fake.kinds == ["seq2seq"] and fake.told[0]["model_type"] == "t5"
    assert model.loaded.keys() == given.keys()
    assert model.lm_head.weight is model.loaded["lm_head.weight"], "untied again"
    assert model.config.num_layers == ours.config.num_decoder_layers


def test_a_tied_head_stays_tied() -> None:
    name = "t5/deep-decoder"
    ours = network(name)
    fake = FakeHuggingFace(FakeModel(shapes(weights(ours), TIED), TIED))
    model = build(fake.installed, files.read_config(FIXTURES / name), ours)
    assert model.lm_head.weight == "tied"
    assert model.config.num_layers == 3, "caches are as deep as the decoder, not the encoder"


@pytest.mark.parametrize("change", ["missing", "strange", "shape"])
def test_other_tensors_than_ours_are_refused_by_name(change: str) -> None:
    ours = network("torch/llama")
    given = shapes(weights(ours))
    norm = given.pop("model.norm.weight")
    if change != "missing":
        given["model.norm.weight"] = norm if change == "strange" else (3,)
    if change == "strange":
        given["model.more.weight"] = norm
    fake = FakeHuggingFace(FakeModel(given))
    with pytest.raises(NoBaselineError, match=r"model\.(norm|more)\.weight"):
        build(fake.installed, files.read_config(FIXTURES / "torch/llama"), ours)


def test_a_model_that_transformers_does_not_build_is_told_in_one_line() -> None:
    fake = FakeHuggingFace()  # which has no model to hand out
    with pytest.raises(NoBaselineError, match="type llama") as told:
        config = files.read_config(FIXTURES / "torch/llama")
        build(fake.installed, config, network("torch/llama"))
    assert "\n" not in str(told.value)
