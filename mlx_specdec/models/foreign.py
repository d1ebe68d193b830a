"""Weights that were not quantized by MLX: what config.json says about them, and error messages."""

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..checkpoints.files import text_config
from ..errors import first_line
from .per_layer import with_parts


def entry_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the entry in config.json about another program's quantization, {} without one."""
    for part in (config, text_config(config)):
        entry = part.get("quantization_config")
        if "quantization" not in config and isinstance(entry, Mapping):
            return entry
    return {}


def without_entry(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration without the entry about another program's quantization."""
    return with_parts(
        config, lambda part: {key: part[key] for key in part if key != "quantization_config"}
    )


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
