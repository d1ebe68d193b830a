"""Adapters that mlx-lm has trained (LoRA, DoRA, or whole layers), put onto a decoder-only model.

mlx-lm does it; what it takes on trust is looked at first. Imports mlx-lm and with it transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.utils import dequantize_model, load_adapters

from ...checkpoints import files
from ...checkpoints.disk import read_json
from ...checkpoints.formats import safetensors
from ...checkpoints.tensors import dtype_name
from ...errors import CheckpointError, OptionError, SpecdecError, first_line
from ..base import identity_of
from ..cache_settings import CacheSettings
from ..number_format import NumberFormat, count, evaluate, is_quantized, on_cpu
from . import sharding as decoder_sharding
from .loader import cannot_build, open_model
from .model import DecoderOnlyModel

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"


def adapt(model: nn.Module, adapter: Path) -> dict[str, Any]:
    """Put an adapter onto a model, lazily, and return its configuration.

    adapter: the directory that mlx-lm wrote. Raises CheckpointError where it is none, is damaged,
    or belongs to another model.
    """
    for name in (CONFIG, WEIGHTS):
        if not (adapter / name).is_file():
            raise CheckpointError(
                f"{adapter} is no adapter of mlx-lm: it has no {name}{_other_programs(adapter)}"
            )
    told = read_json(adapter / CONFIG)
    if told.get("fine_tune_type", "lora") != "full":
        missing = [name for name in ("num_layers", "lora_parameters") if name not in told]
        if missing:
            raise CheckpointError(f"{adapter / CONFIG} has no {missing[0]}: mlx-lm writes one")
    safetensors.read_header(adapter / WEIGHTS)
    try:
        load_adapters(model, str(adapter))
    except Exception as problem:  # mlx-lm checks little: whatever fails first tells
        said = " ".join(str(problem).split())
        raise CheckpointError(
            f"{adapter} does not fit the model ({type(problem).__name__}: {said:.200}): name the "
            "model that it was trained on"
        ) from problem
    model.eval()  # New layers drop values at random until they are told not to.
    return told


def _other_programs(adapter: Path) -> str:
    if (adapter / "adapter_model.safetensors").is_file():
        return " (it is an adapter of PEFT: merge it into its model there, and convert the result)"
    return ""


def load(
    directory: Path,
    config: Mapping[str, Any],
    numbers: NumberFormat,
    caches: CacheSettings | None,
    adapter: Path | None = None,
    group: mx.distributed.Group | None = None,
    *,
    pipeline: bool = False,
) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    """See `families.Family.load`. The directory may have torch's archives in the place of
    model*.safetensors; layers are quantized that mlx-lm's converter would quantize. group: of ranks
    that share the model, each the part of every layer, or as a pipeline some of the layers."""
    if group is not None:
        decoder_sharding.check(config, group.size(), pipeline=pipeline)
    read = _read(directory, config)
    adapted = None if adapter is None else adapt(read, adapter)
    model = in_asked_numbers(read, str(directory), numbers)
    words = in_words(model)
    if group is not None:
        decoder_sharding.divide(model, group, pipeline=pipeline)
    try:
        evaluate(model)
        # Ranks find out together what they do not all know.
        identity = None if group else identity_of(config, words, caches, adapted)
        runnable = DecoderOnlyModel(
            model, max_length(config, model, caches), caches, identity, group, pipeline=pipeline
        )
    except RuntimeError as problem:
        if "metal" not in str(problem).lower():
            raise
        raise CheckpointError(
            f"{directory} needs a kernel that MLX has on Metal only ({first_line(problem):.100}): "
            "run it on a Mac's GPU"
        ) from problem
    except (SpecdecError, MemoryError, OSError):
        raise
    except Exception as problem:  # building one pass shows what config.json has that cannot be run
        raise CheckpointError(f"{directory}: {cannot_build(problem)}") from problem
    return runnable, _eos(directory, config), words


def in_asked_numbers(model: nn.Module, name: str, numbers: NumberFormat) -> nn.Module:
    """The model, or another one of the same weights, cast and quantized as asked for, lazily.

    name: for messages. Raises OptionError.
    """
    quantized = is_quantized(model)
    numbers.check_plain(name, quantized)
    if quantized and numbers.expands(count(model)):
        model = dequantize_model(model)
    if numbers.dtype != "auto" or on_cpu():
        cast(model, numbers.floating(mx.float32))
    if numbers.q_bits is not None:
        _quantize(model, numbers.q_bits, numbers.q_group_size)
    return model


def _read(directory: Path, config: Mapping[str, Any]) -> nn.Module:
    """The model with its weights not computed yet, so that what fails later is no file's fault."""
    opened = open_model(directory, config, dict(files.tensors(directory)))
    opened.model.load_weights(list(opened.weights.items()))
    return opened.model


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """All floating weights to `dtype`, but those that a model wants kept in float32; lazily."""
    may = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, array: mx.array) -> mx.array:
        return (
            array.astype(dtype) if may(path) and mx.issubdtype(array.dtype, mx.floating) else array
        )

    model.update(tree_map_with_path(change, model.parameters()))


def _quantize(model: nn.Module, bits: int, group_size: int) -> None:
    choice = getattr(model, "quant_predicate", None)

    def suits(path: str, module: nn.Module) -> Any:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        return choice(path, module) if choice is not None else True

    try:
        nn.quantize(model, group_size, bits, class_predicate=suits)
    except ValueError as error:
        raise OptionError(f"cannot quantize to {bits} bits: {first_line(error)}") from error
    if not is_quantized(model):
        raise OptionError(f"no layer's width is a multiple of {group_size}: take a smaller group")


def max_length(
    config: Mapping[str, Any], model: nn.Module, caches: CacheSettings | None = None
) -> int | None:
    """Longest sequence in tokens that a decoder-only model's config.json allows; None: no end.

    Scaled positions reach further, and with a window none is too far; but rotations that follow
    the length of a sequence would depend on how many rows a pass has beyond it.
    """
    for part in (_text_config(config), config):
        if isinstance(length := part.get("max_position_embeddings"), int):
            if any("Dynamic" in type(module).__name__ for module in model.modules()):
                return length
            windowed = caches is not None and caches.max_size is not None
            return None if windowed else max(length, _scaled_length(part, length))
        if isinstance(part.get("n_positions"), int):
            return int(part["n_positions"])
    return None


def _scaled_length(config: Mapping[str, Any], length: int) -> int:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(scaling, Mapping):
        return length
    kind, factor = scaling.get("rope_type") or scaling.get("type"), scaling.get("factor")
    if kind not in ("linear", "llama3", "yarn") or not isinstance(factor, int | float):
        return length
    original = scaling.get("original_max_position_embeddings")
    return int((original if isinstance(original, int) else length) * factor)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a wrapper's configuration that is about its language model; maybe empty."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else {}


def _eos(directory: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    return files.eos_token_ids(directory, config) or files.eos_token_ids(
        directory, _text_config(config)
    )


def in_words(model: nn.Module) -> str:
    """The kind of weights, such as "bfloat16" or "4-bit, bfloat16"."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = dtype_name(array.dtype)
            sizes[name] = sizes.get(name, 0) + array.nbytes
    floating = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit, {floating}" if bits else floating
