"""The table of families of models. A family is imported when it is first needed, so that T5 does
not wait for mlx-lm; a new one is a module with an object `family`, an `EncoderDecoderFamily` of
`encoder_decoder.family`, and a line in ENCODER_DECODERS. Decoder-only families are mlx-lm's."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.core as mx
import mlx.nn as nn

from ..text.languages import Languages
from ..text.tokenizer import Kind, Tokenizer
from .base import Base
from .cache_settings import CacheSettings
from .number_format import NumberFormat
from .outline import Outline
from .trainable import Trainable

Config = Mapping[str, Any]
ENCODER_DECODERS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5.family"),
    "t5gemma2": "t5gemma2",
    **dict.fromkeys(("bart", "mbart", "marian", "m2m_100", "pegasus"), "bart.family"),
}
"""model_type of config.json -> the module of the family."""


class Family(Protocol):
    """What a family has, as a module or as an object."""

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

    def cut(self, network: Any, kept: Sequence[int]) -> None:
        """Have the decoder compute only these of its layers. Raises OptionError if it cannot."""

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        """The configuration of a model of some of the decoder's layers, named by their numbers.
        Raises CheckpointError where config.json does not say how many there are."""

    def with_width(self, config: Config, width: int) -> dict[str, Any]:
        """The same, of another width; a head stays as wide as it was. Raises OptionError."""

    def empty(self, config: Config, like: Any) -> Base:
        """A model of this configuration whose weights do not count. Raises OptionError where there
        is none. like: a network of the family, for what config.json does not say."""

    def languages(self, network: Any, tokenizer: Tokenizer) -> Languages | None:
        """Return the languages of a model that translates, None where it names none."""


def is_encoder_decoder(config: Config) -> bool:
    return str(config.get("model_type")) in ENCODER_DECODERS


def of_config(config: Config) -> Family:
    if is_encoder_decoder(config):
        module = import_module(f".{ENCODER_DECODERS[str(config['model_type'])]}", __package__)
        return cast(Family, module.family)
    from .mlx_lm import family as decoder_family

    return decoder_family


def of_network(network: nn.Module) -> Family:
    return of_config({"model_type": getattr(network, "model_type", None)})


def of_model(model: Base) -> Family:
    return of_network(model.network)
