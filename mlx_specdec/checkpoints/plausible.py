"""Numbers of a config.json that no decoder-only model can have, refused before one is built.

Knows the names that families share. mlx-lm believes them: it makes a layer for each that is asked
for, and tells a wrong width by whatever exception comes first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError

LARGEST = 2**31 - 1
LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_ABOVE_0 = ("vocab_size", "hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head")
_FROM_0 = ("intermediate_size", "num_key_value_heads", "head_dim", "num_local_experts")
_FACTORS = ("rope_theta", "rms_norm_eps")


def check_numbers(directory: Path, config: Mapping[str, Any], tensors: int) -> None:
    """Raises CheckpointError for a size, a number of layers or a factor that cannot be.

    tensors: how many the weights have; each layer has at least one. Numbers alone are judged: what
    some families write as a list, and what is absent, is for mlx-lm to understand.
    """
    for part in _parts(config):
        for name in (*_ABOVE_0, *_FROM_0, *LAYERS):
            value = part.get(name)
            least = 1 if name in _ABOVE_0 else 0
            if isinstance(value, int | float) and not _is_whole(value, least):
                raise CheckpointError(
                    f"{directory / 'config.json'} has {name} {_short(value)}: need a whole number "
                    f"from {least} to {LARGEST}"
                )
        for name in LAYERS:
            if isinstance(part.get(name), int) and part[name] > tensors:
                raise CheckpointError(
                    f"{directory / 'config.json'} asks for {part[name]} layers, and there are "
                    f"{tensors} tensors"
                )
        for name in _FACTORS:
            if name in part and not _is_factor(part[name]):
                raise CheckpointError(
                    f"{directory / 'config.json'} has {name} {_short(part[name])}: need a number "
                    "above 0"
                )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configuration, and that of a wrapper's language model."""
    yield config
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        yield inner


def _is_whole(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST


def _is_factor(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _short(value: Any) -> str:
    # A number of thousands of digits is none that Python writes out.
    if type(value) is int and abs(value) > 10**40:
        return "of more than 40 digits"
    return f"{value!a:.40}"
