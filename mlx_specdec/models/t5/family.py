"""T5 and its kin: loading, outlines, training, smaller models; see `families.Family`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ...checkpoints import files
from ...checkpoints import t5_keys as keys
from ...checkpoints.quantization import Quantization, stored_quantization
from ...checkpoints.t5_keys import check_generates
from ...checkpoints.tensors import DTYPES, check_weights, dtype_name, same
from ...errors import CheckpointError, OptionError
from ...text.tokenizer import Kind
from ..base import Base, identity_of
from ..cache_settings import CacheSettings
from ..number_format import (
    NumberFormat,
    count,
    evaluate,
    expand,
    is_quantized,
    quantize,
    stored_dtype,
)
from ..outline import Outline
from ..sharding import check_even
from ..trainable import Ids, padded, places
from .config import T5Config
from .context import EncoderDecoderModel
from .network import T5


def load(
    directory: Path,
    config: Mapping[str, Any],
    numbers: NumberFormat,
    caches: CacheSettings | None,
    adapter: Path | None = None,
    group: mx.distributed.Group | None = None,
    *,
    pipeline: bool = False,
) -> tuple[EncoderDecoderModel, tuple[int, ...], str]:
    """See `families.Family.load`."""
    if caches is not None and caches != CacheSettings():
        raise OptionError(
            f"{directory} is a T5 model, whose caches are neither quantized nor cut: leave "
            "kv-bits and max-kv-size out"
        )
    if pipeline:
        raise OptionError("a T5 model cannot be a pipeline: take distributed tensor")
    if adapter is not None:
        raise OptionError(
            f"{directory} is a T5 model, for which mlx-lm has no adapters: leave adapter-path out"
        )
    stored = stored_quantization(config)
    numbers.check_plain(directory, stored)
    if group is not None:
        shape = T5Config.from_dict(config, own_head=False)
        shared = {"attention heads": shape.num_heads, "feed-forward columns": shape.d_ff}
        check_even(shared, group.size())
    weights, places = _places(directory, config)
    infos = {name: weights.infos[place] for name, place in places.items()}
    try:
        shape = T5Config.from_dict(config, own_head=keys.HEAD in places)
        network = _network(shape, stored, places)
        shapes = {name: array.shape for name, array in tree_flatten(network.parameters())}
        check_weights(shapes, {name: info.shape for name, info in infos.items()})
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from None
    # The widest of those stored: some checkpoints keep in float32 what half precision cannot hold.
    types = (DTYPES[info.dtype] for info in infos.values())
    widest = mx.result_type(*filter(_is_float, types))
    floating = numbers.floating(widest)
    if numbers.q_bits is not None:
        _quantize_on_load(network, config, numbers)
    if stored is not None and numbers.expands(count(network)):
        network.load_weights([(name, weights.read(place)) for name, place in places.items()])
        expand(network)
        network.set_dtype(floating)
        stored = None
    else:
        for name, place in places.items():
            parts = _in_numbers(network, name, weights.read(place), floating)
            if not weights.lazy:
                mx.eval(parts)  # so that the source's array can be freed
            network.load_weights(parts, strict=False)
    if group is not None:
        network.shard(group)
    evaluate(network)
    words = dtype_name(network.encoder.final_layer_norm.weight.dtype)
    bits = numbers.q_bits or (stored or {}).get("bits")
    words = words if bits is None else f"{bits}-bit, {words}"
    identity = None if group is not None else identity_of(config, words)
    return EncoderDecoderModel(network, identity), files.eos_token_ids(directory, config), words


def _places(directory: Path, config: Mapping[str, Any]) -> tuple[files.Weights, dict[str, str]]:
    """The tensors, and where those to read are stored, by our names; without a head that only
    repeats `shared`."""
    weights = files.Weights(directory)
    check_generates(directory, config, weights.infos)
    places = keys.names(weights.infos)
    head, shared = places.get(keys.HEAD), places.get(keys.SHARED)
    repeats = head and shared and same(weights.tensor(head), weights.tensor(shared))
    return weights, keys.without_head(places) if repeats else places


def _in_numbers(
    network: T5, name: str, array: mx.array, floating: mx.Dtype
) -> list[tuple[str, mx.array]]:
    """Cast a tensor, quantize it if its layer is quantized and it is not, and return its parts."""
    if not _is_float(array.dtype):
        return [(name, array)]
    array = array.astype(floating)
    path, _, part = name.rpartition(".")
    layer = reduce(lambda at, key: at[int(key) if key.isdigit() else key], path.split("."), network)
    if part != "weight" or not hasattr(layer, "bits"):
        return [(name, array)]
    how = Quantization(layer.bits, layer.group_size, layer.mode)
    return [(f"{path}.{part}", rows) for part, rows in how.quantize(array).items()]


def _is_float(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


def _network(shape: T5Config, stored: Mapping[str, Any] | None, weights: Collection[str]) -> T5:
    # Every layer has tensors: a configuration that asks for more would only build for hours.
    if max(shape.num_layers, shape.num_decoder_layers) > len(weights):
        raise CheckpointError(
            f"config.json asks for {shape.num_layers} and {shape.num_decoder_layers} layers, and "
            f"there are {len(weights)} tensors"
        )
    network = T5(shape)
    if stored is not None:
        _quantize(network, stored, lambda path, _: f"{path}.scales" in weights)
    return network


def _quantize_on_load(network: T5, config: Mapping[str, Any], numbers: NumberFormat) -> None:
    """Quantize as a conversion would. Raises OptionError where no matrix divides into groups."""
    assert numbers.q_bits is not None
    default = Quantization(numbers.q_bits, numbers.q_group_size)

    def choose(path: str, module: nn.Module) -> Any:
        shape = module.weight.shape
        how = keys.quantization_of(config, f"{path}.weight", shape, default)
        return False if how is None else how.as_dict()

    quantize(network, numbers.q_bits, numbers.q_group_size, choose)


def _quantize(
    network: T5, stored: Mapping[str, Any], choose: Callable[[str, tuple[int, ...]], bool]
) -> None:
    """Quantize as stored where rows divide into groups. choose: whether, by path and shape."""

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        how, able = Quantization.of(stored, path), hasattr(module, "to_quantized")
        fits = able and module.weight.shape[-1] % how.group_size == 0
        return how.as_dict() if fits and choose(path, module.weight.shape) else False

    nn.quantize(network, class_predicate=predicate)


class T5Outline(Outline):
    """Outline of a T5; see `loading.outline`."""

    kind: Kind = "encoder-decoder"

    def __init__(
        self, config: Mapping[str, Any], name: str, numbers: NumberFormat, depth: int | None
    ) -> None:
        # Only the weights show for sure whether the head is tied. The families in which it is not
        # do not scale the decoder's output.
        own_head = not keys.scales_output(config) or config.get("tie_word_embeddings") is False
        shape = T5Config.from_dict(config, own_head=own_head)
        if depth is not None:
            shape = replace(shape, num_layers=1, num_decoder_layers=depth)
        network = T5(shape)
        stored = stored_quantization(config)
        numbers.check_plain(name, stored)
        floating = numbers.floating(stored_dtype(config))
        network.set_dtype(floating)
        if stored is not None and not numbers.expands(count(network)):
            _quantize(network, stored, lambda path, at: keys.quantizable(f"{path}.weight", at, 1))
        if numbers.q_bits is not None:
            _quantize_on_load(network, config, numbers)
        super().__init__(network, network.decoder.block)
        self.vocabulary = shape.vocab_size
        bits = numbers.q_bits or (stored or {}).get("bits")
        self.dtype = f"{bits}-bit, " * is_quantized(network) + dtype_name(floating)

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        return self.network.cache_nbytes(prompt, generated + 1)

    def _model(self) -> Base:
        return EncoderDecoderModel(self.network)


class TrainableT5:
    """trainable.Trainable over a T5: the encoder reads prompts, the decoder predicts texts."""

    def __init__(self, network: T5) -> None:
        self.network = network

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        start = self.network.config.decoder_start_token_id
        sources, lengths = padded(prompts), [len(prompt) for prompt in prompts]
        mask = np.arange(sources.shape[1]) < np.array(lengths)[:, None]
        fed = padded([[start, *text[:-1]] for text in texts])
        wanted = places([(0, len(text)) for text in texts], fed.shape[1])
        return mx.array(sources), mx.array(mask), mx.array(fed), mx.array(wanted)

    def logits(self, *inputs: mx.array) -> mx.array:
        sources, mask, fed, wanted = inputs
        network, length = self.network, fed.shape[1]
        encoded = network.project_encoded(network.encode(sources, mask))
        tables = network.decoder.bias_tables(length)
        masks = network.decoder.masks(tables, length, np.arange(length)[None])
        states = network.decode(fed, [None] * len(encoded), encoded, masks, mask)
        rows = states.reshape(-1, states.shape[-1])[wanted]
        return network.head(rows[None])[0]


kind: Kind = "encoder-decoder"
outline, trainable = T5Outline, TrainableT5


def model(network: T5, max_length: int | None) -> Base:
    return EncoderDecoderModel(network)


def layers(network: T5) -> Sequence[nn.Module]:
    return list(network.decoder.block)


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Where config.json leaves the decoder's layers out, there are as many as the encoder's."""
    return {**config, "num_decoder_layers": len(chosen)}


def with_width(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    share = width / config["d_model"]
    heads, inner = (max(1, round(config[name] * share)) for name in ("num_heads", "d_ff"))
    return {**config, "d_model": width, "d_ff": inner, "num_heads": heads}


def empty(config: Mapping[str, Any], like: T5) -> Base:
    """The head is tied unless that of `like` is not."""
    return EncoderDecoderModel(T5(T5Config.from_dict(config, own_head=like.config.own_head)))
