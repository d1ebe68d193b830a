"""Every decoder-only model that mlx-lm implements; see `families.Family`.

Imports mlx-lm and with it transformers (about a second).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError, OptionError
from ...interfaces import FINAL
from ...text.tokenizer import Kind
from ..base import Base
from ..trainable import Ids, padded, places
from .loading import load as load
from .loading import max_length as longest_text
from .model import DecoderOnlyModel
from .outline import DecoderOnlyOutline, network_of, own_randomness
from .outline import with_layers as with_layers


class TrainableDecoder:
    """trainable.Trainable over an mlx-lm model.

    Raises OptionError for a model that does not show the input of its head.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        # Some models take a kernel without gradient unless they are told.
        network.train()
        self._model = DecoderOnlyModel(network)
        self._model.width  # noqa: B018  it raises here, before anything is trained

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """Prompts with their texts, and the rows' places."""
        tokens = padded([[*p, *t[:-1]] for p, t in zip(prompts, texts, strict=True)])
        spans = [
            (len(prompt) - 1, len(prompt) - 1 + len(text))
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        return mx.array(tokens), mx.array(places(spans, tokens.shape[1]))

    def logits(self, *inputs: mx.array) -> mx.array:
        """As Trainable says. The head sees the rows that are asked for, and no others."""
        tokens, wanted = inputs
        states = self._model.run(tokens, None, (FINAL,)).hidden[FINAL]
        rows = states.reshape(-1, states.shape[-1])[wanted]
        return self._model.head(rows[None])[0]


kind: Kind = "decoder-only"
outline, trainable = DecoderOnlyOutline, TrainableDecoder
_WIDTHS = ("hidden_size", "intermediate_size", "num_attention_heads")


def model(network: nn.Module, max_length: int | None) -> Base:
    """The model that runs it."""
    return DecoderOnlyModel(network, max_length)


def layers(network: nn.Module) -> Sequence[nn.Module]:
    """None where a family does not name them so."""
    return list(getattr(network, "layers", ()))


def with_width(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """As many groups of heads as fit; the feed-forward network is as wide in proportion."""
    if any(type(config.get(key)) is not int for key in _WIDTHS):
        raise OptionError(
            f"a model of type {config.get('model_type')} has no width that can be chosen: leave "
            "width out, or give a draft model to begin with"
        )
    whole, inner, heads = (config[key] for key in _WIDTHS)
    groups = config.get("num_key_value_heads") or heads
    per_group = heads // groups
    count = max(1, round(heads * width / whole / per_group)) * per_group
    return {
        **config,
        "hidden_size": width,
        "intermediate_size": max(1, round(inner * width / whole)),
        "num_attention_heads": count,
        "num_key_value_heads": count // per_group,
        "head_dim": config.get("head_dim") or whole // heads,
    }


def empty(config: Mapping[str, Any], like: nn.Module) -> Base:
    """Raises OptionError: some families need a layer of each of their kinds."""
    try:
        with own_randomness():
            network = network_of(config, "the draft")
            mx.eval(network.parameters())
        return DecoderOnlyModel(network, longest_text(config, network))
    except (CheckpointError, IndexError, ValueError) as problem:
        raise OptionError(
            f"a model of type {config.get('model_type')} cannot have this shape: give more layers, "
            "or a draft model to begin with"
        ) from problem
