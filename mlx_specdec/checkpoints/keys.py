"""What tensors are called here, and which of them may be quantised. Data and small pure functions.

T5 keeps Hugging Face's names; decoder-only models keep theirs too, mlx-lm maps them. Knows names
and shapes. Knows nothing of files and holds no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError

ENCODER_DECODER = ("t5", "mt5", "umt5")
DECODER_ONLY = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
)
SUPPORTED = (*ENCODER_DECODER, *DECODER_ONLY)
"""Families that are tried here; of decoder-only models mlx-lm's own list is the whole truth."""

Q_BITS = (2, 3, 4, 5, 6, 8)
Q_GROUP_SIZES = (32, 64, 128)

SHARED, HEAD = "shared.weight", "lm_head.weight"
TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
PACKED = ("scales", "biases")

# Copies of shared.weight, and a bias that old checkpoints hold and no T5 uses.
_DROPPED = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
UNUSED = "no T5 has positions in its cross-attention"
"""Why the only tensors that are dropped and no copies are dropped."""
# Measured on an English-French T5 of 8 M weights, groups of 64, 120 unseen sentences: everything at
# 4 bits costs 0.054 nats of KL divergence per token, with the tied embedding at 8 bits 0.030, for
# 11 % more bytes. No other matrix helps as much: 8 bits for DenseReluDense.wo give 0.050.
_WIDER = re.compile(r"(shared|lm_head)\.weight")
WIDER_BITS = 8
# Tables of positions are tiny, and their error would go into every attention score.
_KEPT = re.compile(r"relative_attention_bias")


@dataclass(frozen=True)
class Quantisation:
    """How one matrix is packed: bits per weight, and weights that share a scale and a bias."""

    bits: int
    group_size: int


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a model of the T5 family."""
    return config.get("model_type") in ENCODER_DECODER


def translate(config: Mapping[str, Any], key: str) -> str | None:
    """Our name of a checkpoint's tensor, None for one that is left out."""
    if is_encoder_decoder(config) and _DROPPED.fullmatch(key):
        return None
    return key


def names(config: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Our name -> the checkpoint's, of every tensor that is kept.

    A checkpoint may hold `shared` under the names of its two copies alone.
    """
    stored = list(keys)
    found = {name: key for key in stored if (name := translate(config, key)) is not None}
    twins = [key for key in TWINS if key in stored]
    if is_encoder_decoder(config) and SHARED not in found and twins:
        found[SHARED] = twins[0]
    return found


def feed_forward(config: Mapping[str, Any]) -> str:
    """A T5's kind of feed-forward network; where config.json is silent, what transformers takes."""
    silent = "relu" if config.get("model_type") == "t5" else "gated-gelu"
    return str(config.get("feed_forward_proj") or silent)


def scales_output(config: Mapping[str, Any]) -> bool:
    """Whether a T5 scales the decoder's output by d_model ** -0.5 before the head.

    Not the same as whether the head is tied: transformers 5 writes tie_word_embeddings: true for
    every T5 that it saves, and says the scaling in scale_decoder_outputs.
    """
    said = config.get("scale_decoder_outputs")
    if said is not None:
        return bool(said)
    if config.get("model_type") == "mt5":
        return False
    return config.get("tie_word_embeddings") is not False


def t5_shapes(config: Mapping[str, Any], *, own_head: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a T5 and its shape before any packing.

    own_head: the head is not a copy of `shared`. Raises CheckpointError where config.json lacks a
    size.
    """
    width, vocabulary = _size(config, "d_model"), _size(config, "vocab_size")
    depths = {"encoder": _size(config, "num_layers")}
    depths["decoder"] = _size(config, "num_decoder_layers", depths["encoder"])
    shapes: dict[str, tuple[int, ...]] = {SHARED: (vocabulary, width)}
    if own_head:
        shapes[HEAD] = (vocabulary, width)
    for stack, depth in depths.items():
        shapes[f"{stack}.final_layer_norm.weight"] = (width,)
        for number in range(depth):
            block = f"{stack}.block.{number}"
            shapes.update(_block_shapes(config, block, number, stack == "decoder"))
    return shapes


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The "quantization" entry of a converted model, None where it is not quantised.

    Raises CheckpointError for bits or a group size that MLX does not have.
    """
    entry = config.get("quantization")
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError("config.json has a quantization entry that is no object")
    for part in (entry, *(each for each in entry.values() if isinstance(each, Mapping))):
        if part.get("bits") not in Q_BITS or part.get("group_size") not in Q_GROUP_SIZES:
            raise CheckpointError(
                f"config.json asks for {part.get('bits')!r} bits in groups of "
                f"{part.get('group_size')!r}: not a quantisation that MLX has"
            )
    return entry


def quantizable(
    config: Mapping[str, Any], key: str, shape: tuple[int, ...], group_size: int
) -> bool:
    """Whether a weight is quantised: matrices whose rows divide into groups, positions left out."""
    return (
        key.endswith(".weight")
        and len(shape) == 2
        and shape[-1] % group_size == 0
        and not _KEPT.search(key)
    )


def _block_shapes(
    config: Mapping[str, Any], block: str, number: int, is_decoder: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, hidden = _size(config, "d_model"), _size(config, "d_ff")
    heads = _size(config, "num_heads")
    inner = heads * _size(config, "d_kv")
    attentions = ("SelfAttention", "EncDecAttention") if is_decoder else ("SelfAttention",)
    for place, attention in enumerate(attentions):
        layer = f"{block}.layer.{place}"
        yield f"{layer}.layer_norm.weight", (width,)
        for part in "qkv":
            yield f"{layer}.{attention}.{part}.weight", (inner, width)
        yield f"{layer}.{attention}.o.weight", (width, inner)
    if number == 0 or config.get("model_type") == "umt5":
        buckets = _size(config, "relative_attention_num_buckets", 32)
        name = f"{block}.layer.0.SelfAttention.relative_attention_bias.weight"
        yield name, (buckets, heads)
    layer = f"{block}.layer.{len(attentions)}"
    yield f"{layer}.layer_norm.weight", (width,)
    gated = feed_forward(config).startswith("gated-")
    for part in ("wi_0", "wi_1") if gated else ("wi",):
        yield f"{layer}.DenseReluDense.{part}.weight", (hidden, width)
    yield f"{layer}.DenseReluDense.wo.weight", (width, hidden)


def _size(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise CheckpointError(f"config.json needs {name}, a whole number above 0, not {value!r}")
    return value


def quantisation_of(
    config: Mapping[str, Any], key: str, shape: tuple[int, ...], default: Quantisation
) -> Quantisation | None:
    """How one of a T5's weights is packed, None for what is left alone.

    Embedding and head get at least 8 bits, the rest what is asked for.
    """
    if not quantizable(config, key, shape, default.group_size):
        return None
    if is_encoder_decoder(config) and _WIDER.fullmatch(key):
        return Quantisation(max(default.bits, WIDER_BITS), default.group_size)
    return default
