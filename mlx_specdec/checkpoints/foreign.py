"""Weights that were not quantized by MLX: conversion of GPTQ's layout to MLX's, and error messages
about other layouts."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..errors import CheckpointError, first_line
from .quantization import Q_GROUP_SIZES, Quantization

_WORD = 32
"""Bits of an integer that holds several quantized weights."""
_BITS = (2, 4, 8)
"""Bits per weight for which GPTQ and MLX fill a word of 32 bits in the same way."""
_PACKED_PARTS = ("qweight", "qzeros", "scales", "g_idx")
_SECOND = "gptq_v2"
"""The layout of GPTQ that stores zero points as they are. The first stores them less 1."""


def entry_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry in config.json about another program's quantization, {} without one."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        entry = part.get("quantization_config")
        if "quantization" not in config and isinstance(entry, Mapping):
            return entry
    return {}


def without_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the entry about another program's quantization."""
    text = config.get("text_config")
    rest = {key: value for key, value in config.items() if key != "quantization_config"}
    return {**rest, "text_config": without_entry(text)} if isinstance(text, Mapping) else rest


def is_packed(dtypes: Iterable[mx.Dtype]) -> bool:
    """Return whether tensors of these dtypes include quantized weights."""
    plain = (mx.int64, mx.bool_)  # counters and masks of old checkpoints
    return any(not mx.issubdtype(dtype, mx.floating) and dtype not in plain for dtype in dtypes)


def explain(problem: Exception, entry: Mapping[str, Any], otherwise: str = "") -> str:
    """Return an error message about packed weights that names their quantization. otherwise: The
    message if the entry names none; by default the message of `problem`."""
    if not isinstance(method := entry.get("quant_method"), str):
        return otherwise or str(problem)
    layout = f" ({entry['format']!s:.40})" if "format" in entry else ""
    reason, _, _ = first_line(problem).partition(":")
    return (
        f"the weights are quantized by {method:.40}{layout} in a way that is not supported "
        f"({reason:.200}): take the original model, or one that mlx-lm has quantized"
    )


def is_gptq(names: Iterable[str], entry: Mapping[str, Any]) -> bool:
    """Return whether tensors with these names include GPTQ matrices. entry: See `entry_of`."""
    return entry.get("quant_method") == "gptq" and any(n.endswith(".qweight") for n in names)


def gptq_as_mlx(
    arrays: Mapping[str, mx.array], entry: Mapping[str, Any]
) -> tuple[dict[str, mx.array], Quantization]:
    """Return lazy tensors with GPTQ matrices in MLX's layout, and their quantization.

    Args:
        arrays: All tensors of a checkpoint. A matrix has `qweight`, int32 of shape (inputs * bits /
            32, outputs), `scales` (groups, outputs) and maybe `qzeros` (groups, outputs * bits /
            32). `g_idx` says the group of each input.
        entry: See `entry_of`.

    Raises:
        CheckpointError: If MLX has no such bits or groups, or the inputs of a matrix are not in the
            order of the groups.
    """
    how = Quantization(entry.get("bits", 4), entry.get("group_size", 128))
    if how.bits not in _BITS or how.group_size not in Q_GROUP_SIZES:
        raise CheckpointError(
            f"GPTQ with {how.bits!a:.20} bits in groups of {how.group_size!a:.20} is not "
            "supported: take another variant of the model"
        )
    offset = 0 if entry.get("checkpoint_format") == _SECOND else 1
    paths = [name.removesuffix(".qweight") for name in arrays if name.endswith(".qweight")]
    parts = {f"{path}.{part}" for path in paths for part in _PACKED_PARTS}
    made = {name: array for name, array in arrays.items() if name not in parts}
    for path in paths:
        order = arrays.get(f"{path}.g_idx")
        if order is not None and not _is_ordered(order, how.group_size):
            raise CheckpointError(
                f"GPTQ has the inputs of {path} in an order of its own (desc_act), which is not "
                "supported: take another variant of the model"
            )
        scales = arrays[f"{path}.scales"]
        if (zeros := arrays.get(f"{path}.qzeros")) is None:
            points = mx.array(1 << (how.bits - 1))
        else:
            points = _unpacked(zeros, how.bits) + offset
        made[f"{path}.weight"] = mx.contiguous(arrays[f"{path}.qweight"].view(mx.uint32).T)
        made[f"{path}.scales"] = mx.contiguous(scales.T)
        biases = -points.astype(mx.float32) * scales.astype(mx.float32)
        made[f"{path}.biases"] = mx.contiguous(biases.astype(scales.dtype).T)
    return made, how


def _is_ordered(order: mx.array, group_size: int) -> bool:
    expected = mx.arange(order.size) // group_size
    return bool(mx.array_equal(order.astype(mx.int32), expected.astype(mx.int32)).item())


def _unpacked(words: mx.array, bits: int) -> mx.array:
    """Return the numbers in words, shape (rows, words) -> (rows, words * 32 / bits)."""
    shifts = mx.arange(0, _WORD, bits).astype(mx.uint32)
    numbers = (words.view(mx.uint32)[..., None] >> shifts) & ((1 << bits) - 1)
    return numbers.reshape(words.shape[0], -1)
