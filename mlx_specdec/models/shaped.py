"""A model and the shape of a smaller one -> that smaller model, to be trained.

Weights are the model's own where only the depth changes, else random.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import keys
from ..errors import OptionError
from . import families
from .base import Base
from .self_draft import twin_of
from .trainable import dequantize

EMBEDDING_SPREAD = 0.02


def shaped(
    model: Base, config: Mapping[str, Any], layers: int, width: int | None, seed: int
) -> tuple[Base, dict[str, Any]]:
    """A model with `layers` of the decoder's layers, and its config.json.

    config: the model's. width: of hidden states; None keeps it and takes the model's own layers,
    evenly chosen, with all that is around them. seed: of random weights. Raises OptionError for a
    shape that the model cannot have.
    """
    family, network = families.of_model(model), model.network
    depth = len(family.layers(network))
    if layers > depth:
        raise OptionError(f"layers must be 1 to the target's {depth}, not {layers}")
    chosen = [round(at * (depth - 1) / max(1, layers - 1)) for at in range(layers)]
    plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
    asked = family.with_layers(plain, chosen)
    if width is not None:
        asked = family.with_width(asked, width)
    model = family.empty(asked, network)
    small = model.network
    own = family.layers(network)
    weights = _copied(network, own, small, chosen) if width is None else _random(small, seed)
    small.update(tree_unflatten(list(weights)))
    mx.eval(small.parameters())
    return model, asked


def _copied(
    network: nn.Module, layers: Sequence[nn.Module], small: nn.Module, chosen: Sequence[int]
) -> Iterator[tuple[str, mx.array]]:
    """Each of the small network's arrays, from the layer that it stands for."""
    path = next((path for path, module in network.named_modules() if module is layers[0]), "")
    before = path.removesuffix("0")
    whole = twin_of(network)
    dequantize(whole)
    given = dict(tree_flatten(whole.parameters()))
    for name, array in tree_flatten(small.parameters()):
        source = name
        if before and name.startswith(before):
            number, _, rest = name.removeprefix(before).partition(".")
            source = f"{before}{chosen[int(number)]}.{rest}"
        if source not in given or given[source].shape != array.shape:
            raise OptionError(
                "the target's layers are not alike, and a few of them are no model: give a draft "
                "model to begin with"
            )
        yield name, given[source]


def _random(network: nn.Module, seed: int) -> Iterator[tuple[str, mx.array]]:
    """Matrices of variance 1 / inputs, embeddings as their families begin with; vectors stay."""
    tables = {
        f"{path}.weight" for path, m in network.named_modules() if isinstance(m, nn.Embedding)
    }
    leaves = sorted(tree_flatten(network.parameters()))
    draws = mx.random.split(mx.random.key(seed), len(leaves))
    for (name, array), draw in zip(leaves, draws, strict=True):
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            yield name, array
            continue
        spread = array.shape[-1] ** -0.5
        if name in tables:
            spread = 1.0 if name == keys.SHARED else EMBEDDING_SPREAD
        yield name, spread * mx.random.normal(array.shape, key=draw)
