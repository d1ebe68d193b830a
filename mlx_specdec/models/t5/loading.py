"""A directory with a T5's weights -> a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints import files
from ...checkpoints import t5_keys as keys
from ...checkpoints.quantization import Quantization, stored_quantization
from ...checkpoints.t5_keys import check_generates
from ...checkpoints.tensors import DTYPES, TensorInfo, check_weights, dtype_name, same
from ...errors import CheckpointError, OptionError
from ...text.tokenizer import Kind
from ..base import Base, identity_of
from ..cache_settings import CacheSettings
from ..number_format import NumberFormat, count, evaluate, is_quantized, stored_dtype
from ..outline import Outline
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
) -> tuple[EncoderDecoderModel, tuple[int, ...], str]:
    """See `families.Family.load`. group: of ranks that share the model; this one reads the weights
    and keeps its part. Raises OptionError where they cannot have equal parts."""
    if caches is not None and caches != CacheSettings():
        raise OptionError(
            f"{directory} is a T5 model, whose caches are neither quantized nor cut: leave "
            "kv-bits and max-kv-size out"
        )
    if adapter is not None:
        raise OptionError(
            f"{directory} is a T5 model, for which mlx-lm has no adapters: leave adapter-path out"
        )
    stored = stored_quantization(config)
    numbers.check_plain(directory, stored)
    if group is not None:
        T5Config.from_dict(config, own_head=False).check_shares(group.size())
    weights, places = _places(directory, config)
    infos = {name: weights.infos[place] for name, place in places.items()}
    try:
        shape = T5Config.from_dict(config, own_head=keys.HEAD in places)
        network = _network(shape, stored, places)
        _check(network, infos)
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from None
    arrays: Iterable[tuple[str, mx.array]]
    arrays = ((name, weights.read(place)) for name, place in places.items())
    if stored is not None and numbers.expands(count(network)):
        arrays, stored, network = _dequantized(dict(arrays), stored).items(), None, T5(shape)
    # The widest of those stored: some checkpoints keep in float32 what half precision cannot hold.
    types = (DTYPES[info.dtype] for info in infos.values())
    widest = mx.result_type(*filter(_is_float, types))
    floating = numbers.floating(widest)
    if numbers.q_bits is not None:
        quantize_on_load(network, config, numbers)
    read: list[tuple[str, mx.array]] = []
    for name, array in arrays:
        parts = _in_numbers(network, name, array, floating)
        if not weights.lazy:
            mx.eval(parts)  # so that the source's array can be freed
        read += parts
    network.load_weights(read)
    # No other reference may keep the arrays alive while layers are joined.
    del arrays, read, parts, array
    if group is not None:
        network.shard(group)
    evaluate(network)
    words = dtype_name(network.encoder.final_layer_norm.weight.dtype)
    bits = numbers.q_bits or (stored or {}).get("bits")
    words = words if bits is None else f"{bits}-bit, {words}"
    identity = None if group is not None else identity_of(config, words)
    model = EncoderDecoderModel(network, identity)
    mx.eval(network.parameters())
    return model, files.eos_token_ids(directory, config), words


def _places(directory: Path, config: Mapping[str, Any]) -> tuple[files.Weights, dict[str, str]]:
    """The tensors, and under our names those to read; a head that only repeats `shared` is left
    out."""
    weights = files.Weights(directory)
    check_generates(directory, config, weights.infos)
    places = keys.names(weights.infos)
    head, shared = places.get(keys.HEAD), places.get(keys.SHARED)
    repeats = head and shared and same(weights.tensor(head), weights.tensor(shared))
    return weights, keys.without_head(places) if repeats else places


def _in_numbers(
    network: T5, name: str, array: mx.array, floating: mx.Dtype
) -> list[tuple[str, mx.array]]:
    """Cast a tensor, and quantize it if its layer is quantized and it is not; return its parts."""
    if not _is_float(array.dtype):
        return [(name, array)]
    array = array.astype(floating)
    path, _, part = name.rpartition(".")
    layer = reduce(lambda at, key: at[int(key) if key.isdigit() else key], path.split("."), network)
    if part != "weight" or not hasattr(layer, "bits"):
        return [(name, array)]
    how = Quantization(layer.bits, layer.group_size, layer.mode)
    return [(f"{path}.{part}", rows) for part, rows in how.quantize(array).items()]


def _check(network: nn.Module, infos: Mapping[str, TensorInfo]) -> None:
    """Raises CheckpointError for the first tensor missing, left over, or not as asked for."""
    expected = dict(tree_flatten(network.parameters()))
    shapes = {name: array.shape for name, array in expected.items()}
    check_weights(shapes, {name: info.shape for name, info in infos.items()})
    for name in sorted(expected):
        asked, given = expected[name].dtype, DTYPES[infos[name].dtype]
        if asked != given and not (_is_float(asked) and _is_float(given)):
            raise CheckpointError(
                f"{name} is stored as {dtype_name(given)} where {dtype_name(asked)} is needed"
            )


def _is_float(dtype: mx.Dtype) -> bool:
    return mx.issubdtype(dtype, mx.floating)


def _network(shape: T5Config, stored: Mapping[str, Any] | None, weights: Collection[str]) -> T5:
    """A T5 with random weights, quantized where the stored ones are."""
    # Every layer has tensors: a configuration that asks for more would only build for hours.
    if max(shape.num_layers, shape.num_decoder_layers) > len(weights):
        raise CheckpointError(
            f"config.json asks for {shape.num_layers} and {shape.num_decoder_layers} layers, and "
            f"there are {len(weights)} tensors"
        )
    network = T5(shape)
    if stored is not None:
        entry = stored
        _quantize(
            network,
            lambda path, _: Quantization.of(entry, path) if f"{path}.scales" in weights else None,
        )
    return network


def quantize_on_load(network: T5, config: Mapping[str, Any], numbers: NumberFormat) -> None:
    """As a conversion would. Raises OptionError where no matrix divides into groups."""
    assert numbers.q_bits is not None
    default = Quantization(numbers.q_bits, numbers.q_group_size)
    if not _quantize(
        network, lambda path, shape: keys.quantization_of(config, f"{path}.weight", shape, default)
    ):
        raise OptionError(
            f"no layer's width is a multiple of {numbers.q_group_size}: take a smaller group"
        )


def quantize_as_stored(network: T5, stored: Mapping[str, Any]) -> None:
    """The matrices that a converted model's config.json says are quantized."""

    def choose(path: str, shape: tuple[int, ...]) -> Quantization | None:
        how = Quantization.of(stored, path)
        return how if keys.quantizable(f"{path}.weight", shape, how.group_size) else None

    _quantize(network, choose)


def _quantize(network: T5, choose: Callable[[str, tuple[int, ...]], Quantization | None]) -> bool:
    """Quantize every matrix for which `choose` says how; gives whether there was one."""

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        how = choose(path, module.weight.shape)
        return how.as_dict() if how and module.weight.shape[-1] % how.group_size == 0 else False

    nn.quantize(network, class_predicate=predicate)
    return is_quantized(network)


def _dequantized(weights: Mapping[str, mx.array], stored: Mapping[str, Any]) -> dict[str, mx.array]:
    result = {}
    for name, array in weights.items():
        path, _, part = name.rpartition(".")
        scales, biases = weights.get(f"{path}.scales"), weights.get(f"{path}.biases")
        if scales is None:
            result[name] = array
        elif part == "weight":
            how = Quantization.of(stored, path)
            result[name] = mx.dequantize(
                array, scales, biases, group_size=how.group_size, bits=how.bits, mode=how.mode
            )
    return result


class T5Outline(Outline):
    """Outline of a T5; see `loading.outline`."""

    kind: Kind = "encoder-decoder"

    def __init__(
        self, config: Mapping[str, Any], name: str, numbers: NumberFormat, depth: int | None
    ) -> None:
        # Whether the head is one of its own only the weights say for sure. The families that have
        # one do not scale the decoder's output.
        own_head = not keys.scales_output(config) or config.get("tie_word_embeddings") is False
        shape = T5Config.from_dict(config, own_head=own_head)
        if depth is not None:
            shape = replace(shape, num_layers=1, num_decoder_layers=depth)
        network = T5(shape)
        number = _set_numbers(network, config, name, numbers)
        super().__init__(network, network.decoder.block)
        self.vocabulary = shape.vocab_size
        bits = numbers.q_bits or (stored_quantization(config) or {}).get("bits")
        self.dtype = f"{bits}-bit, " * is_quantized(network) + dtype_name(number)

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """As Outline says."""
        return self.network.cache_nbytes(prompt, generated + 1)

    def _model(self) -> Base:
        return EncoderDecoderModel(self.network)


def _set_numbers(
    network: T5, config: Mapping[str, Any], name: str, numbers: NumberFormat
) -> mx.Dtype:
    """Cast and quantize as loading would; gives the floating type."""
    stored = stored_quantization(config)
    numbers.check_plain(name, stored)
    if stored is not None and numbers.expands(count(network)):
        stored = None
    floating = numbers.floating(stored_dtype(config))
    network.set_dtype(floating)
    if stored is not None:
        quantize_as_stored(network, stored)
    if numbers.q_bits is not None:
        quantize_on_load(network, config, numbers)
    return floating
