"""Entries of config.json that mlx-lm does not read: another program's quantization, with error
messages about its weights, and `per_layer_config`, which transformers writes since 5.15. In a
Gemma 4 it has the sizes of layers with full attention, for which mlx-lm reads older keys."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import mlx.core as mx

from ..checkpoints.files import TEXT_CONFIG, text_config
from ..errors import CheckpointError, first_line

PER_LAYER = "per_layer_config"
OLDER = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


def entry_of(config: Mapping[str, Any], dtypes: Iterable[mx.Dtype]) -> Mapping[str, Any]:
    """Return the entry in config.json about another program's quantization of tensors of these
    dtypes. Return {} if there is none, or if the tensors are not quantized."""
    parts = (config, text_config(config))
    entries = (part.get("quantization_config") for part in parts if "quantization" not in config)
    found = (entry for entry in entries if isinstance(entry, Mapping))
    return next(found, {}) if is_packed(dtypes) else {}


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


def spelled_old(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json, and its `text_config`, with the older keys.

    Raises:
        CheckpointError: If layers differ in a way that the older keys cannot say."""
    return with_parts(config, _old)


def with_parts(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Apply a function to config.json and to its `text_config`."""
    changed = change(config)
    if isinstance(inner := config.get(TEXT_CONFIG), Mapping):
        changed[TEXT_CONFIG] = change(inner)
    return changed


def _old(part: Mapping[str, Any]) -> dict[str, Any]:
    changed, layers = dict(part), part.get(PER_LAYER)
    is_gemma = str(part.get("model_type")).startswith("gemma4")
    if not is_gemma or not isinstance(layers, Mapping) or not layers:
        return changed
    first, *later = layers.values()
    alike = isinstance(first, Mapping) and all(layer == first for layer in later)
    if not alike or not first.keys() <= OLDER.keys():
        raise CheckpointError(
            f"config.json gives single layers entries in {PER_LAYER} that mlx-lm does not read: "
            f"layers may differ from the others in {' and '.join(OLDER)} alone, and all by the same"
        )
    del changed[PER_LAYER]
    return changed | {OLDER[name]: value for name, value in first.items()}
