"""A model and the shape of a smaller one -> that smaller model, to be trained.

Knows which entries of config.json say how deep and wide a model is, and layers' names. Weights are
the model's own where only the depth changes, else random. Reads no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ..checkpoints import keys
from ..errors import CheckpointError, OptionError
from .base import Base
from .encoder_decoder import EncoderDecoderModel
from .self_draft import twin_of
from .t5 import T5
from .t5_config import T5Config
from .trainable import unpack

EMBEDDING_SPREAD = 0.02
_DECODER_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")


def shaped(
    model: Base, config: Mapping[str, Any], layers: int, width: int | None, seed: int
) -> tuple[Base, dict[str, Any]]:
    """A model with `layers` of the decoder's layers, and its config.json.

    config: the model's. width: of hidden states; None keeps it and takes the model's own layers,
    evenly chosen, with all that is around them. seed: of random weights. Raises OptionError for a
    shape that the model cannot have.
    """
    depth = len(_layers(model))
    if layers > depth:
        raise OptionError(f"layers must be 1 to the target's {depth}, not {layers}")
    chosen = [round(at * (depth - 1) / max(1, layers - 1)) for at in range(layers)]
    asked = {k: v for k, v in config.items() if not k.startswith("quantization")}
    asked = _with_layers(model, asked, chosen)
    if width is not None:
        asked = _with_width(model, asked, width)
    small = _empty(model, asked)
    network: nn.Module = small.network
    weights = _copied(model, network, chosen) if width is None else _random(network, seed)
    network.update(tree_unflatten(list(weights)))
    mx.eval(network.parameters())
    return small, asked


def _layers(model: Base) -> Sequence[nn.Module]:
    network: Any = model.network
    layers = network.decoder.block if isinstance(network, T5) else getattr(network, "layers", ())
    return list(layers)


def _with_layers(model: Base, config: dict[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    if isinstance(model, EncoderDecoderModel):
        # Where config.json leaves the decoder's layers out, there are as many as the encoder's.
        return {**config, "num_decoder_layers": len(chosen)}
    from .decoder_outline import with_layers

    return with_layers(config, chosen)


def _with_width(model: Base, config: dict[str, Any], width: int) -> dict[str, Any]:
    """Everything that grows with the width does so; a head stays as wide as it was."""
    if isinstance(model, EncoderDecoderModel):
        share = width / model.network.config.d_model
        heads = max(1, round(model.network.config.num_heads * share))
        inner = max(1, round(model.network.config.d_ff * share))
        return {**config, "d_model": width, "d_ff": inner, "num_heads": heads}
    if any(type(config.get(key)) is not int for key in _DECODER_WIDTHS):
        raise OptionError(
            f"a model of type {config.get('model_type')} has no width that can be chosen: leave "
            "width out, or give a draft model to begin with"
        )
    whole, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or whole // heads
    groups = config.get("num_key_value_heads") or heads
    per_group = heads // groups
    count = max(1, round(heads * width / whole / per_group)) * per_group
    return {
        **config,
        "hidden_size": width,
        "intermediate_size": max(1, round(config["intermediate_size"] * width / whole)),
        "num_attention_heads": count,
        "num_key_value_heads": count // per_group,
        "head_dim": head,
    }


def _empty(model: Base, config: dict[str, Any]) -> Base:
    """A model of this configuration; its weights do not count."""
    if isinstance(model, EncoderDecoderModel):
        own_head = model.network.config.own_head
        return EncoderDecoderModel(T5(T5Config.from_dict(config, own_head=own_head)))
    from .decoder_loading import max_length
    from .decoder_only import DecoderOnlyModel
    from .decoder_outline import network_of, own_randomness

    try:
        with own_randomness():
            network = network_of(config, "the draft")
            mx.eval(network.parameters())
        return DecoderOnlyModel(network, max_length(config))
    except (CheckpointError, IndexError, ValueError) as problem:
        # Some families need a layer of each of their kinds.
        raise OptionError(
            f"a model of type {config.get('model_type')} cannot have this shape: give more layers, "
            "or a draft model to begin with"
        ) from problem


def _copied(model: Base, small: nn.Module, chosen: Sequence[int]) -> Iterator[tuple[str, mx.array]]:
    """Each of the small network's arrays, from the layer of the model that it stands for."""
    network = twin_of(model.network)
    first = _layers(model)[0]
    original: nn.Module = model.network
    path = next((path for path, module in original.named_modules() if module is first), "")
    before = path.removesuffix("0")
    unpack(network)
    given = dict(tree_flatten(network.parameters()))
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
