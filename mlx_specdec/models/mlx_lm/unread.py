"""Keys of config.json that change the computation and that the network does not read.

`settings.json` lists such keys of each type with their neutral values.
`benchmarks/list_settings.py` writes it by rules from the configuration classes of transformers."""

import json
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from ...checkpoints.files import SLIDING_ATTENTION
from ...errors import CheckpointError
from . import mends, rotary

Part = Mapping[str, Any]
SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
"""Name of an activation -> another name of the same function."""
SLIDING_WINDOW = "sliding_window"
WINDOW_KEYS = (SLIDING_WINDOW, "use_sliding_window", "max_window_layers")
"""Keys that only matter if a layer slides."""


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(files(__package__).joinpath("settings.json").read_text("utf-8"))


def check(config: Part, arguments: type) -> None:
    """Raise CheckpointError if config.json sets a key that the network does not read to a value
    that is not neutral. A window is no error: see `window`.

    Args:
        arguments: The class of mlx-lm that holds the family's arguments."""
    for key, value in _unread(config, arguments):
        if key not in WINDOW_KEYS:
            raise CheckpointError(
                f"config.json sets {key} to {value!a:.40}, which mlx-lm ignores for models of type "
                f"{config.get('model_type')}: the output would be wrong. Update mlx-lm"
            )


def window(config: Part, arguments: type) -> int | None:
    """Return the window of a model whose network attends to all tokens although config.json wants
    a window, or None. Sequences up to this length are computed right."""
    unread = dict(_unread(config, arguments))
    part = _part(config)
    size, kinds = unread.get(SLIDING_WINDOW), part.get("layer_types")
    slides = part.get("use_sliding_window", True) and (not kinds or SLIDING_ATTENTION in kinds)
    reached = isinstance(size, int) and 0 < size < part.get("max_position_embeddings", sys.maxsize)
    return size if slides and reached else None


def _part(config: Part) -> Part:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def _unread(config: Part, arguments: type) -> Iterator[tuple[str, Any]]:
    """Yield each key that is set to a value that is not neutral and that nobody reads."""
    part, table = _part(config), _table()
    kind = str(config.get("model_type"))
    neutral = table.get(str(part.get("model_type", kind)), table.get(kind, {}))
    read = {*rotary.names_of(arguments), *mends.reads(part)}
    for key, default in neutral.items():
        value = part.get(key, default)
        if key not in read and _plain(value) != _plain(default):
            yield key, value


def _plain(value: Any) -> Any:
    """Return a value in one spelling: null, false and 0 are None, and activations have one name."""
    return SYNONYMS.get(value, value) if isinstance(value, str) else value or None
