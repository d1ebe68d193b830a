"""A directory -> a Model ready to run, converted on the way where that is needed.

Knows which family a configuration belongs to, and T5's weights. Decoder-only models, and mlx-lm
with them, are imported only when one is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..cache_settings import CacheSettings
from ..checkpoints import files, keys
from ..checkpoints.t5_purpose import check_generates
from ..errors import CheckpointError, OptionError
from ..text.tokenizer import Kind
from .base import Base
from .encoder_decoder import EncoderDecoderModel
from .number_format import expands, on_cpu
from .t5 import T5
from .t5_config import T5Config

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Loaded:
    """A model with what its files say besides weights. dtype: in words, for example "float32"."""

    model: Base
    eos_token_ids: tuple[int, ...]
    kind: Kind
    dtype: str


def load_model(
    directory: Path,
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    caches: CacheSettings | None = None,
) -> Loaded:
    """Load a checkpoint in Hugging Face's or mlx-lm's layout.

    dtype: "auto" is float32 on the CPU, where half precision is slower and quantised weights of
    moderate size are expanded, and as stored elsewhere.
    q_bits: quantise on load. caches: for decoder-only models. Raises CheckpointError for damaged or
    unsupported files, OptionError for settings that do not suit them.
    """
    check_numbers(dtype, q_bits, q_group_size)
    config = files.read_config(directory)
    if keys.is_encoder_decoder(config):
        if caches is not None and caches != CacheSettings():
            raise OptionError(
                f"{directory} is a T5 model, whose caches are neither quantised nor cut: leave "
                "kv-bits and max-kv-size out"
            )
        return _load_t5(directory, config, dtype, q_bits, q_group_size)
    from .decoder_loading import load_decoder_only

    model, eos, words = load_decoder_only(
        directory, config, dtype=dtype, q_bits=q_bits, q_group_size=q_group_size, caches=caches
    )
    return Loaded(model, eos, "decoder-only", words)


def check_numbers(dtype: str, q_bits: int | None, q_group_size: int) -> None:
    """Raises OptionError for a number format that `load_model` does not have."""
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if q_bits is not None and q_bits not in keys.Q_BITS:
        bits = ", ".join(map(str, keys.Q_BITS))
        raise OptionError(f"q-bits must be one of {bits}, not {q_bits}")
    if q_bits is not None and q_group_size not in keys.Q_GROUP_SIZES:
        sizes = ", ".join(map(str, keys.Q_GROUP_SIZES))
        raise OptionError(f"q-group-size must be one of {sizes}, not {q_group_size}")


def _load_t5(
    directory: Path,
    config: Mapping[str, Any],
    dtype: str,
    q_bits: int | None,
    q_group_size: int,
) -> Loaded:
    stored = keys.quantization(config)
    if stored is not None and q_bits is not None:
        raise OptionError(f"{directory} is quantised already: leave the number of bits out")
    weights = read_t5_weights(directory, config)
    try:
        shape = T5Config.from_dict(config, own_head=keys.HEAD in weights)
        network = _network(shape, stored, weights)
        check_weights(network, weights)
    except CheckpointError as problem:
        raise CheckpointError(f"{directory}: {problem}") from None
    if stored is not None and dtype == "auto" and expands(_count(weights, stored["group_size"])):
        weights, stored = _dequantised(weights, stored), None
        network = T5(shape)
    wanted = _number_format(weights, dtype, packed=stored is not None)
    network.load_weights(
        [
            (name, array.astype(wanted) if _is_float(array) else array)
            for name, array in weights.items()
        ]
    )
    if q_bits is not None:
        quantise_on_load(network, config, q_bits, q_group_size)
    mx.eval(network.parameters())
    words = _words(network.encoder.final_layer_norm.weight.dtype)
    bits = q_bits if q_bits is not None else (stored or {}).get("bits")
    return Loaded(
        EncoderDecoderModel(network),
        files.eos_token_ids(directory, config),
        "encoder-decoder",
        words if bits is None else f"{bits}-bit, {words}",
    )


def read_t5_weights(directory: Path, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """All tensors under our names, lazily; a head that only repeats `shared` is left out."""
    weights: dict[str, mx.array] = {}
    twin, stored = None, files.Weights(directory)
    check_generates(directory, config, stored.infos)
    for key, array in stored.tensors():
        if key in keys.TWINS:
            twin = array
        name = keys.translate(config, key)
        if name is not None:
            weights[name] = array
    if keys.SHARED not in weights and twin is not None:
        weights[keys.SHARED] = twin
    head, shared = weights.get(keys.HEAD), weights.get(keys.SHARED)
    if (
        head is not None
        and shared is not None
        and head.shape == shared.shape
        and mx.array_equal(head, shared).item()
    ):
        for part in ("weight", *keys.PACKED):
            weights.pop(f"lm_head.{part}", None)
    return weights


def check_weights(network: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raises CheckpointError for the first tensor missing, superfluous, or not as asked for."""
    expected = dict(tree_flatten(network.parameters()))
    missing, extra = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing:
        raise CheckpointError(f"the weights lack {min(missing)}: download the model again")
    if extra:
        raise CheckpointError(f"the weights have {min(extra)}, which config.json does not ask for")
    for name in sorted(expected):
        asked, found = expected[name], weights[name]
        if asked.shape != found.shape:
            raise CheckpointError(
                f"{name} has shape {found.shape} where config.json asks for {asked.shape}"
            )
        if asked.dtype != found.dtype and not (_is_float(asked) and _is_float(found)):
            raise CheckpointError(
                f"{name} is stored as {_words(found.dtype)} where {_words(asked.dtype)} is needed"
            )


def _is_float(array: mx.array) -> bool:
    return mx.issubdtype(array.dtype, mx.floating)


def _words(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _number_format(weights: Mapping[str, mx.array], dtype: str, *, packed: bool) -> mx.Dtype:
    """What all floating weights are cast to; the widest of those stored where several are, since
    some checkpoints keep in float32 what half precision cannot hold."""
    if dtype != "auto":
        return getattr(mx, dtype)
    if on_cpu() and not packed:
        return mx.float32
    return mx.result_type(*(array.dtype for array in weights.values() if _is_float(array)))


def _network(
    shape: T5Config, stored: Mapping[str, Any] | None, weights: Mapping[str, mx.array]
) -> T5:
    """A T5 with random weights, packed where the stored ones are."""
    # Every layer has tensors: a configuration that asks for more would only build for hours.
    if max(shape.num_layers, shape.num_decoder_layers) > len(weights):
        raise CheckpointError(
            f"config.json asks for {shape.num_layers} and {shape.num_decoder_layers} layers, and "
            f"there are {len(weights)} tensors"
        )
    network = T5(shape)
    if stored is not None:
        _pack(
            network, lambda path, _: _packing(stored, path) if f"{path}.scales" in weights else None
        )
    return network


def _packing(stored: Mapping[str, Any], path: str) -> keys.Quantisation:
    """How one matrix of a quantised checkpoint is packed."""
    own = stored.get(path)
    how = own if isinstance(own, Mapping) else stored
    return keys.Quantisation(how["bits"], how["group_size"], how.get("mode", "affine"))


def quantise_on_load(network: T5, config: Mapping[str, Any], bits: int, group_size: int) -> None:
    """Pack as a conversion would. Raises OptionError where no matrix divides into groups."""
    default = keys.Quantisation(bits, group_size)
    if not _pack(
        network,
        lambda path, shape: keys.quantisation_of(config, f"{path}.weight", shape, default),
    ):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def pack_as_stored(network: T5, config: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Pack the matrices that a converted model's config.json says are packed."""

    def choose(path: str, shape: tuple[int, ...]) -> keys.Quantisation | None:
        how = _packing(stored, path)
        fits = keys.quantizable(config, f"{path}.weight", shape, how.group_size)
        return how if fits else None

    _pack(network, choose)


def _pack(network: T5, choose: Callable[[str, tuple[int, ...]], keys.Quantisation | None]) -> bool:
    """Quantise every matrix for which `choose` says how; gives whether there was one."""
    packed = False

    def predicate(path: str, module: nn.Module) -> bool | dict[str, int | str]:
        nonlocal packed
        if not hasattr(module, "to_quantized"):
            return False
        how = choose(path, module.weight.shape)
        if how is None or module.weight.shape[-1] % how.group_size:
            return False
        packed = True
        return {"bits": how.bits, "group_size": how.group_size, "mode": how.mode}

    nn.quantize(network, class_predicate=predicate)
    return packed


def _count(weights: Mapping[str, mx.array], group_size: int) -> int:
    """How many weights there are, packed ones included."""
    return sum(
        array.size * (group_size if name.endswith(".scales") else 1)
        for name, array in weights.items()
        if array.dtype != mx.uint32
    )


def _dequantised(weights: Mapping[str, mx.array], stored: Mapping[str, Any]) -> dict[str, mx.array]:
    result = {}
    for name, array in weights.items():
        path, _, part = name.rpartition(".")
        if f"{path}.scales" not in weights:
            result[name] = array
        elif part == "weight":
            how = _packing(stored, path)
            result[name] = mx.dequantize(
                array,
                weights[f"{path}.scales"],
                weights.get(f"{path}.biases"),
                group_size=how.group_size,
                bits=how.bits,
                mode=how.mode,
            )
    return result
