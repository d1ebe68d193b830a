"""Smaller models out of larger ones: whose layers they have, and which shapes there are."""

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.training.draft import shaped
from mlx_specdec.types import Model

from ..support import tiny


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
