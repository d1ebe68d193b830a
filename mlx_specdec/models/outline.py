"""config.json -> a model known by its arrays' shapes, which random numbers may fill.

Until `model` is called no array holds anything, so that the outline of a model that fits nowhere
costs nothing. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import families
from .network_outline import Outline as Outline
from .number_format import NumberFormat


def outline(
    config: Mapping[str, Any],
    name: str,
    *,
    dtype: str = "auto",
    q_bits: int | None = None,
    q_group_size: int = 64,
    depth: int | None = None,
) -> Outline:
    """The outline of the model that a configuration describes.

    name: for messages. dtype, q_bits, q_group_size: as `loading.load_model` has them, where "as
    stored" is what config.json says. depth: a model of so many layers instead; an encoder then has
    one, since no step runs it.

    Raises OptionError for settings that do not suit, CheckpointError for a configuration that does
    not describe a supported model, or not one that can have this depth.
    """
    numbers = NumberFormat(dtype, q_bits, q_group_size)
    return families.of_config(config).outline(config, name, numbers, depth)
