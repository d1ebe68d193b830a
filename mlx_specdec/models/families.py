"""The table of model families. A family is imported when it is first needed, so that T5 models do
not import mlx-lm. A new encoder-decoder family is a module with an object `family`, of the class
`encoder_decoder.family.EncoderDecoderFamily`, and a line in ENCODER_DECODERS. mlx-lm provides the
decoder-only models."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import mlx.nn as nn

from ..text.tokenizer import Tokenizer
from .base import Base, LoadSettings, Trainable
from .encoder_decoder.languages import Languages

Config = Mapping[str, Any]
ENCODER_DECODERS = {
    **dict.fromkeys(("t5", "mt5", "umt5"), "t5"),
    "t5gemma2": "t5gemma2",
    **dict.fromkeys(("bart", "mbart", "marian", "m2m_100", "pegasus"), "bart"),
}
"""The module of the family for each model_type of config.json."""


class Family(Protocol):
    """A family of models, which is a module or an object."""

    def load(
        self, directory: Path, config: Config, how: LoadSettings
    ) -> tuple[Base, tuple[int, ...], str]:
        """Return the model, the tokens that end a completion (maybe none), and the dtype in words,
        such as "bfloat16" or "4-bit, bfloat16". See `loading.load_model`."""

    def trainable(self, network: Any) -> Trainable:
        """Return the training interface of a network whose weights are float32."""

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        """Return the configuration of a model that has only the `chosen` decoder layers. Raises
        CheckpointError if config.json does not say how many layers there are."""

    def empty(self, config: Config, like: Any) -> Base:
        """Return a model of a configuration with arbitrary weights. Facts that config.json lacks
        come from `like`, a network of the family. Raises OptionError if this is impossible."""

    def languages(self, network: Any, tokenizer: Tokenizer) -> Languages | None:
        """Return the languages of a translation model, or None if it names none."""


def is_encoder_decoder(config: Config) -> bool:
    return str(config.get("model_type")) in ENCODER_DECODERS


def of_config(config: Config) -> Family:
    if is_encoder_decoder(config):
        module = import_module(f".{ENCODER_DECODERS[str(config['model_type'])]}", __package__)
        return cast(Family, module.family)
    from .mlx_lm import family as decoder_family

    return decoder_family


def check_type(config: Config) -> None:
    """Raise CheckpointError if there is no family for a configuration."""
    if not is_encoder_decoder(config):
        from .mlx_lm.loader import classes

        classes(config)


def of_network(network: nn.Module) -> Family:
    return of_config({"model_type": getattr(network, "model_type", None)})
