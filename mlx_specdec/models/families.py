"""The table of families of models. A family is a module, imported when it is first needed, so that
T5 does not wait for mlx-lm; a new one is such a module and a line in `of_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints import t5_keys as keys
from ..text.tokenizer import Kind
from .base import Base
from .cache_settings import CacheSettings
from .number_format import NumberFormat
from .outline import Outline
from .trainable import Trainable

Config = Mapping[str, Any]


class Family(Protocol):
    """What the module of a family has."""

    kind: Kind

    def load(
        self,
        directory: Path,
        config: Config,
        numbers: NumberFormat,
        caches: CacheSettings | None,
        adapter: Path | None = None,
        group: mx.distributed.Group | None = None,
        *,
        pipeline: bool = False,
    ) -> tuple[Base, tuple[int, ...], str]:
        """Return the model, the ids that end a text (maybe none), and its numbers in words, such as
        "bfloat16" or "4-bit, bfloat16". See `loading.load_model`."""

    def outline(
        self, config: Config, name: str, numbers: NumberFormat, depth: int | None
    ) -> Outline: ...

    def trainable(self, network: Any) -> Trainable:
        """A network of plain float32 weights, ready to be trained."""

    def model(self, network: Any, max_length: int | None) -> Base: ...

    def layers(self, network: Any) -> Sequence[nn.Module]:
        """The layers that decode."""

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        """The configuration of a model of some of the decoder's layers, named by their numbers.
        Raises CheckpointError where config.json does not say how many there are."""

    def with_width(self, config: Config, width: int) -> dict[str, Any]:
        """The same, of another width; a head stays as wide as it was. Raises OptionError."""

    def empty(self, config: Config, like: Any) -> Base:
        """A model of this configuration whose weights do not count. Raises OptionError where there
        is none. like: a network of the family, for what config.json does not say."""


def of_config(config: Config) -> Family:
    if keys.is_encoder_decoder(config):
        from .t5 import family as t5_family

        return t5_family
    from .mlx_lm import family as decoder_family

    return decoder_family


def of_model(model: Base) -> Family:
    from .t5.network import T5

    return of_config({"model_type": "t5"} if isinstance(model.network, T5) else {})
