"""T5 and its kin; see `families.Family`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...text.tokenizer import Kind
from ..base import Base
from ..trainable import Ids, padded, places
from .config import T5Config
from .context import EncoderDecoderModel
from .loading import T5Outline
from .loading import load as load
from .network import T5


class TrainableT5:
    """trainable.Trainable over a T5: the encoder reads prompts, the decoder predicts texts."""

    def __init__(self, network: T5) -> None:
        self.network = network

    def inputs(self, prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        """Sources, their padding mask, decoder inputs, and the rows' places."""
        start = self.network.config.decoder_start_token_id
        sources, lengths = padded(prompts), [len(prompt) for prompt in prompts]
        mask = np.arange(sources.shape[1]) < np.array(lengths)[:, None]
        fed = padded([[start, *text[:-1]] for text in texts])
        wanted = places([(0, len(text)) for text in texts], fed.shape[1])
        return mx.array(sources), mx.array(mask), mx.array(fed), mx.array(wanted)

    def logits(self, *inputs: mx.array) -> mx.array:
        sources, mask, fed, wanted = inputs
        network, length = self.network, fed.shape[1]
        encoded = network.project_encoded(network.encode(sources, mask))
        tables = network.decoder.bias_tables(length)
        masks = network.decoder.masks(tables, length, 0, length)
        states = network.decode(fed, [None] * len(encoded), encoded, masks, mask)
        rows = states.reshape(-1, states.shape[-1])[wanted]
        return network.head(rows[None])[0]


kind: Kind = "encoder-decoder"
outline, trainable = T5Outline, TrainableT5


def model(network: T5, max_length: int | None) -> Base:
    """max_length: not used, a T5's texts have none."""
    return EncoderDecoderModel(network)


def layers(network: T5) -> Sequence[nn.Module]:
    """The decoder's layers."""
    return list(network.decoder.block)


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """Where config.json leaves the decoder's layers out, there are as many as the encoder's."""
    return {**config, "num_decoder_layers": len(chosen)}


def with_width(config: Mapping[str, Any], width: int) -> dict[str, Any]:
    """As many heads as fit, and a feed-forward network as wide in proportion."""
    share = width / config["d_model"]
    heads, inner = (max(1, round(config[name] * share)) for name in ("num_heads", "d_ff"))
    return {**config, "d_model": width, "d_ff": inner, "num_heads": heads}


def empty(config: Mapping[str, Any], like: T5) -> Base:
    """The head is tied unless that of `like` is not."""
    return EncoderDecoderModel(T5(T5Config.from_dict(config, own_head=like.config.own_head)))
