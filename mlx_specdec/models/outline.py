"""config.json -> a model known by its arrays' shapes, which random numbers may fill.

Until `model` is called no array holds anything, so that the outline of a model that fits nowhere
costs nothing. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..text.tokenizer import Kind
from . import families
from .base import Base
from .number_format import NumberFormat


class Outline(Protocol):
    """A model of which only the configuration is known.

    kind: its family. dtype: its numbers in words. vocabulary: width of the logits. nbytes: of all
    weights. layers: for each layer that decodes what it looks like; equal entries cost the same.
    layer_nbytes: of each of those layers' weights.
    """

    kind: Kind
    dtype: str
    vocabulary: int
    nbytes: int
    layers: Sequence[Hashable]
    layer_nbytes: Sequence[int]

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Bytes of all caches after `prompt` tokens and `generated` more."""
        ...

    def weights(self) -> Mapping[str, mx.array]:
        """All arrays by name; they hold numbers once `model` was called."""
        ...

    def model(self, seed: int = 0, given: Mapping[str, mx.array] | None = None) -> Base:
        """The model with random weights; this is what takes memory and time. Once only.

        given: arrays to take by name, so that two depths of one model share their memory.
        """
        ...


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
