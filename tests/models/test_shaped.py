"""Smaller models out of larger ones: whose layers they have, and which shapes there are."""

import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.checkpoints.files import read_config
from mlx_specdec.errors import OptionError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.training.draft import shaped
from mlx_specdec.types import Model

from ..support import tiny
from ..support.pairs import FIXTURES

T5 = FIXTURES / "tied-scaled-relu"


def weights(model: Model) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in tree_flatten(model.network.parameters())}


def llama(layers: int = 4, **changes: object) -> tuple[Model, dict]:
    settings = {"num_hidden_layers": layers, **changes}
    return DecoderOnlyModel(tiny.build("llama", **settings)), {**tiny.CONFIGS["llama"], **settings}


@pytest.mark.parametrize(
    ("layers", "chosen"), [(1, [0]), (2, [0, 3]), (3, [0, 2, 3]), (4, [0, 1, 2, 3])]
)
def test_layers_are_the_targets_own_evenly_chosen(layers: int, chosen: list[int]) -> None:
    model, config = llama()
    small, changed = shaped(model, config, layers)
    assert changed["num_hidden_layers"] == layers
    original, found = weights(model), weights(small)
    for at, number in enumerate(chosen):
        name = "mlp.up_proj.weight"
        assert np.array_equal(
            found[f"model.layers.{at}.{name}"], original[f"model.layers.{number}.{name}"]
        )
    assert np.array_equal(found["lm_head.weight"], original["lm_head.weight"])


def test_t5_keeps_its_encoder_and_some_of_its_decoder() -> None:
    model = load_model(T5, dtype="float32").model
    small, changed = shaped(model, read_config(T5), 1)
    assert changed["num_decoder_layers"] == 1
    original, found = weights(model), weights(small)
    assert all(np.array_equal(array, original[name]) for name, array in found.items())
    assert {name for name in original if name.startswith("encoder.")} <= found.keys()
    assert not any(name.startswith("decoder.block.1.") for name in found)


def test_a_packed_target_gives_plain_layers_and_stays_packed() -> None:
    model, config = llama(hidden_size=64, intermediate_size=64)
    nn.quantize(model.network, 32, 4)
    small, changed = shaped(model, {**config, "quantization": {"bits": 4}}, 2)
    assert "quantization" not in changed
    assert {array.dtype for array in weights(small).values()} == {np.dtype(np.float32)}
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.network.modules())


def test_more_layers_than_there_are_is_refused() -> None:
    model, config = llama()
    with pytest.raises(OptionError, match="layers must be 1 to the target's 4, not 5"):
        shaped(model, config, 5)


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_families_that_need_a_layer_of_each_kind_say_so(name: str) -> None:
    model = DecoderOnlyModel(tiny.build(name))
    with pytest.raises(OptionError, match="cannot have this shape: give more layers"):
        shaped(model, tiny.CONFIGS[name], 1)
