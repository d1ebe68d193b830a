"""Translation of `per_layer_config`, which transformers writes into config.json since 5.15. In a
Gemma 4 it has the sizes of layers with full attention, for which mlx-lm reads older keys."""

from collections.abc import Callable, Mapping
from typing import Any

from ..checkpoints.files import TEXT_CONFIG
from ..errors import CheckpointError

PER_LAYER = "per_layer_config"
OLDER = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}


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
