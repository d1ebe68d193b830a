"""The family of all decoder-only models that mlx-lm implements; see `families.Family`."""

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import LAYER_COUNT_KEYS
from ...errors import CheckpointError, OptionError
from ...text.tokenizer import Kind, Tokenizer
from ...types import FINAL
from ..base import Base
from ..trainable import Ids, Trainable, padded, places
from .loader import arguments_of, cannot_build, classes
from .loading import load as load
from .loading import max_length
from .mends import mend
from .model import DecoderOnlyModel


def trainable(network: nn.Module) -> Trainable:
    """See `families.Family`. Raises OptionError for a model that hides the input of its head."""
    # Outside training mode some models use a kernel that has no gradient.
    network.train()
    model = DecoderOnlyModel(network)
    model.capture(FINAL)

    def inputs(prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        pairs = list(zip(prompts, texts, strict=True))
        tokens = padded([[*prompt, *text[:-1]] for prompt, text in pairs])
        spans = [(len(prompt) - 1, len(prompt) - 1 + len(text)) for prompt, text in pairs]
        return mx.array(tokens), mx.array(places(spans, tokens.shape[1]))

    def logits(tokens: mx.array, trained: mx.array) -> mx.array:
        # The head is computed for the trained rows only.
        states = model.run(tokens, None, (FINAL,)).hidden[FINAL]
        return model.head(states.reshape(-1, states.shape[-1])[trained][None])[0]

    return Trainable(network, inputs, logits)


kind: Kind = "decoder-only"


def languages(network: nn.Module, tokenizer: Tokenizer) -> None:
    """Return None: chat templates and instructions name the language."""


def empty(config: Mapping[str, Any], like: nn.Module) -> Base:
    """See `families.Family`. Raises OptionError for a shape that the family cannot build, such as
    too few layers for one of each kind."""
    try:
        network = network_of(config, "the draft")
        mx.eval(network.parameters())
        return DecoderOnlyModel(network, max_length(config, network))
    except (CheckpointError, IndexError, ValueError) as problem:
        raise OptionError(
            f"a model of type {config.get('model_type')} cannot have this shape: give more layers, "
            "or a draft model to begin with"
        ) from problem


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """See `families.Family`. Lists with one entry per layer keep the entries of the chosen
    layers."""
    changed = dict(config)
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and any(key in inner for key in LAYER_COUNT_KEYS):
        return {**changed, "text_config": with_layers(inner, chosen)}
    named = [key for key in LAYER_COUNT_KEYS if isinstance(config.get(key), int)]
    if not named:
        raise CheckpointError("config.json does not say how many layers there are")
    layers = config[named[0]]
    for key, value in config.items():
        if key in named:
            changed[key] = len(chosen)
        elif isinstance(value, list) and len(value) == layers:
            changed[key] = [value[number] for number in chosen if number < layers]
    return changed


def network_of(config: Mapping[str, Any], name: str) -> nn.Module:
    """Build mlx-lm's model, whose weights are lazy and random.

    Raises:
        CheckpointError: If mlx-lm cannot build the model."""
    model_class, arguments = classes(config)
    try:
        network = model_class(arguments_of(config, arguments))
        mend(network, config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # mlx-lm does not validate settings, so any error can occur
        raise CheckpointError(f"{name}: {cannot_build(error)}") from error
    network.eval()
    return network
