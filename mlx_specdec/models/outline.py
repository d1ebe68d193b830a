"""config.json -> a model known by its arrays' shapes, which random numbers may fill.

Knows T5's shapes and how MLX delays its work: until `model` is called no array holds anything, so
that the outline of a model that fits nowhere costs nothing. Reads no weights. Decoder-only models,
and mlx-lm with them, are imported only when one is asked for.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..checkpoints import keys
from ..errors import OptionError
from ..text.tokenizer import Kind
from .base import Base
from .encoder_decoder import EncoderDecoderModel
from .kv_cache import STEP
from .loading import check_numbers, pack_as_stored, quantise_on_load
from .number_format import expands, on_cpu
from .random_weights import fill
from .t5 import T5
from .t5_config import T5Config


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
    check_numbers(dtype, q_bits, q_group_size)
    if keys.is_encoder_decoder(config):
        return T5Outline(config, name, dtype, q_bits, q_group_size, depth)
    from .decoder_outline import DecoderOnlyOutline

    return DecoderOnlyOutline(config, name, dtype, q_bits, q_group_size, depth)


def stored_dtype(config: Mapping[str, Any]) -> mx.Dtype:
    """What config.json says its weights are; float32 where it is silent."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        said = str(part.get("dtype") or part.get("torch_dtype") or "").rpartition(".")[2]
        if said in ("float32", "float16", "bfloat16"):
            return getattr(mx, said)
    return mx.float32


def nbytes_of(module: nn.Module) -> int:
    """Bytes of all arrays in a module."""
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


def look_of(module: nn.Module) -> Hashable:
    """Names, shapes and types of all arrays in a module."""
    return tuple(
        (name, array.shape, str(array.dtype)) for name, array in tree_flatten(module.parameters())
    )


class T5Outline:
    """Outline of a T5."""

    kind: Kind = "encoder-decoder"

    def __init__(
        self,
        config: Mapping[str, Any],
        name: str,
        dtype: str,
        q_bits: int | None,
        q_group_size: int,
        depth: int | None,
    ) -> None:
        # Whether the head is one of its own only the weights say for sure. The families that have
        # one do not scale the decoder's output.
        own_head = not keys.scales_output(config) or config.get("tie_word_embeddings") is False
        shape = T5Config.from_dict(config, own_head=own_head)
        if depth is not None:
            shape = replace(shape, num_layers=1, num_decoder_layers=depth)
        self._network = T5(shape)
        self._number = _t5_numbers(self._network, config, name, dtype, q_bits, q_group_size)
        bits = q_bits or (keys.quantization(config) or {}).get("bits")
        words = str(self._number).rpartition(".")[2]
        packed = any(hasattr(module, "bits") for module in self._network.modules())
        self.dtype = f"{bits}-bit, {words}" if packed else words
        self.vocabulary = shape.vocab_size
        self.nbytes = nbytes_of(self._network)
        blocks = self._network.decoder.block
        self.layers: Sequence[Hashable] = [look_of(block) for block in blocks]
        self.layer_nbytes: Sequence[int] = [nbytes_of(block) for block in blocks]

    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """As Outline says: the memory's keys and values, and those of the text in whole steps."""
        shape = self._network.config
        positions = prompt + -(-(generated + 1) // STEP) * STEP
        row = shape.num_heads * shape.d_kv * self._number.size
        return 2 * shape.num_decoder_layers * positions * row

    def weights(self) -> Mapping[str, mx.array]:
        """As Outline says."""
        return dict(tree_flatten(self._network.parameters()))

    def model(self, seed: int = 0, given: Mapping[str, mx.array] | None = None) -> Base:
        """As Outline says."""
        fill(self._network, seed, given or {})
        return EncoderDecoderModel(self._network)


def _t5_numbers(
    network: T5,
    config: Mapping[str, Any],
    name: str,
    dtype: str,
    q_bits: int | None,
    q_group_size: int,
) -> mx.Dtype:
    """Cast and pack as `loading.load_model` would; gives the floating type."""
    stored = keys.quantization(config)
    if stored is not None and q_bits is not None:
        raise OptionError(f"{name} is quantised already: leave the number of bits out")
    count = sum(array.size for _, array in tree_flatten(network.parameters()))
    if stored is not None and dtype == "auto" and expands(count):
        stored = None
    number = stored_dtype(config)
    if dtype != "auto":
        number = getattr(mx, dtype)
    elif on_cpu() and stored is None:
        number = mx.float32
    network.set_dtype(number)
    if stored is not None:
        pack_as_stored(network, config, stored)
    if q_bits is not None:
        quantise_on_load(network, config, q_bits, q_group_size)
    return number
