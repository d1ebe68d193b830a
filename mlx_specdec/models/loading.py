"""A directory -> a Model ready to run, converted on the way where that is needed.

Knows which family a configuration belongs to, and T5's weights. Decoder-only models, and mlx-lm
with them, are imported only when one is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import files, keys
from ..contracts import Model
from ..errors import CheckpointError, OptionError
from ..text.tokenizer import Kind
from .encoder_decoder import EncoderDecoderModel
from .number_format import expands, on_cpu
from .t5 import T5, T5Config

DTYPES = ("auto", "float32", "float16", "bfloat16")

_HEAD, _SHARED = "lm_head.weight", "shared.weight"
_TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


@dataclass(frozen=True)
class Loaded:
    """A model with what its files say besides weights. dtype: in words, for example "float32"."""

    model: Model
    eos_token_ids: tuple[int, ...]
    kind: Kind
    dtype: str


def load_model(
    directory: Path, *, dtype: str = "auto", q_bits: int | None = None, q_group_size: int = 64
) -> Loaded:
    """Load a checkpoint in Hugging Face's or mlx-lm's layout.

    dtype: "auto" is float32 on the CPU, where half precision is slower and quantised weights of
    moderate size are expanded, and as stored elsewhere.
    q_bits: quantise on load. Raises CheckpointError for damaged or unsupported files, OptionError
    for settings that do not suit them.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if q_bits is not None and q_bits not in keys.Q_BITS:
        bits = ", ".join(map(str, keys.Q_BITS))
        raise OptionError(f"q-bits must be one of {bits}, not {q_bits}")
    config = files.read_config(directory)
    if keys.is_encoder_decoder(config):
        return _load_t5(directory, config, dtype, q_bits, q_group_size)
    from .decoder_loading import load_decoder_only

    model, eos, words = load_decoder_only(
        directory, config, dtype=dtype, q_bits=q_bits, q_group_size=q_group_size
    )
    return Loaded(model, eos, "decoder-only", words)


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
    if stored is not None and dtype == "auto" and expands(_count(weights, stored["group_size"])):
        weights, stored = _dequantised(weights, stored), None
    wanted = mx.float32 if dtype == "auto" and on_cpu() and stored is None else None
    if dtype != "auto":
        wanted = getattr(mx, dtype)
    if wanted is not None:
        weights = {
            name: array.astype(wanted) if mx.issubdtype(array.dtype, mx.floating) else array
            for name, array in weights.items()
        }
    network = T5(T5Config.from_dict(config, own_head=_HEAD in weights))
    if stored is not None:
        _quantise_modules(network, stored, weights)
    check_weights(network, weights)
    network.load_weights(list(weights.items()))
    if q_bits is not None:
        _quantise_on_load(network, config, q_bits, q_group_size)
    mx.eval(network.parameters())
    words = str(network.encoder.final_layer_norm.weight.dtype).rpartition(".")[2]
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
    twin = None
    for key, array in files.tensors(directory):
        if key in _TWINS:
            twin = array
        name = keys.translate(config, key)
        if name is not None:
            weights[name] = array
    if _SHARED not in weights and twin is not None:
        weights[_SHARED] = twin
    head, shared = weights.get(_HEAD), weights.get(_SHARED)
    if (
        head is not None
        and shared is not None
        and head.shape == shared.shape
        and mx.array_equal(head, shared).item()
    ):
        for part in ("weight", "scales", "biases"):
            weights.pop(f"lm_head.{part}", None)
    return weights


def check_weights(network: nn.Module, weights: Mapping[str, mx.array]) -> None:
    """Raises CheckpointError for the first missing, superfluous or wrongly shaped tensor."""
    expected = dict(tree_flatten(network.parameters()))
    missing, extra = expected.keys() - weights.keys(), weights.keys() - expected.keys()
    if missing:
        raise CheckpointError(f"the weights lack {min(missing)}: download the model again")
    if extra:
        raise CheckpointError(f"the weights have {min(extra)}, which config.json does not ask for")
    for name in sorted(expected):
        if expected[name].shape != weights[name].shape:
            raise CheckpointError(
                f"{name} has shape {weights[name].shape} where config.json asks for "
                f"{expected[name].shape}"
            )


def _quantise_modules(
    network: nn.Module, stored: Mapping[str, Any], weights: Mapping[str, mx.array]
) -> None:
    def choose(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights:
            return False
        own = stored.get(path)
        return dict(own) if isinstance(own, Mapping) else True

    nn.quantize(network, stored["group_size"], stored["bits"], class_predicate=choose)


def _quantise_on_load(
    network: nn.Module, config: Mapping[str, Any], bits: int, group_size: int
) -> None:
    def choose(path: str, module: nn.Module) -> bool:
        return hasattr(module, "to_quantized") and keys.quantizable(
            config, f"{path}.weight", module.weight.shape, group_size
        )

    nn.quantize(network, group_size, bits, class_predicate=choose)


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
            own = stored.get(path)
            how = own if isinstance(own, Mapping) else stored
            result[name] = mx.dequantize(
                array,
                weights[f"{path}.scales"],
                weights.get(f"{path}.biases"),
                group_size=how["group_size"],
                bits=how["bits"],
            )
    return result
