"""config.json of a T5 -> its outline. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx

from ..checkpoints import keys
from ..checkpoints.quantization import stored_quantization
from ..checkpoints.tensors import dtype_name
from ..text.tokenizer import Kind
from .base import Base
from .encoder_decoder import EncoderDecoderModel
from .number_format import NumberFormat, count, is_quantized, stored_dtype
from .outline import Outline
from .t5 import T5
from .t5_config import T5Config
from .t5_loading import quantize_as_stored, quantize_on_load


class T5Outline(Outline):
    """Outline of a T5; see `outline.outline`."""

    kind: Kind = "encoder-decoder"

    def __init__(
        self, config: Mapping[str, Any], name: str, numbers: NumberFormat, depth: int | None
    ) -> None:
        # Whether the head is one of its own only the weights say for sure. The families that have
        # one do not scale the decoder's output.
        own_head = not keys.scales_output(config) or config.get("tie_word_embeddings") is False
        shape = T5Config.from_dict(config, own_head=own_head)
        if depth is not None:
            shape = replace(shape, num_layers=1, num_decoder_layers=depth)
        network = T5(shape)
        number = _set_numbers(network, config, name, numbers)
        super().__init__(network, network.decoder.block)
        self.vocabulary = shape.vocab_size
        bits = numbers.q_bits or (stored_quantization(config) or {}).get("bits")
        self.dtype = f"{bits}-bit, " * is_quantized(network) + dtype_name(number)

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """As Outline says."""
        return self.network.cache_nbytes(prompt, generated + 1)

    def _model(self) -> Base:
        return EncoderDecoderModel(self.network)


def _set_numbers(
    network: T5, config: Mapping[str, Any], name: str, numbers: NumberFormat
) -> mx.Dtype:
    """Cast and quantize as loading would; gives the floating type."""
    stored = stored_quantization(config)
    numbers.check_plain(name, stored)
    if stored is not None and numbers.expands(count(network)):
        stored = None
    floating = numbers.floating(stored_dtype(config))
    network.set_dtype(floating)
    if stored is not None:
        quantize_as_stored(network, stored)
    if numbers.q_bits is not None:
        quantize_on_load(network, config, numbers)
    return floating
