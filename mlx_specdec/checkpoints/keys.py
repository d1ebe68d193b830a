"""What tensors are called here, which of them may be quantised, and how. Data and pure functions.

T5 keeps Hugging Face's names; decoder-only models keep theirs too, mlx-lm maps them. Knows names,
shapes and MLX's packings. Knows nothing of files and holds no tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

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
LARGEST = 2**31 - 1
"""Extent of an array that MLX has."""
MOST_LAYERS = 10_000

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
    """How one matrix is packed: bits per weight, and weights that share a scale and a bias; mode:
    MLX's name of the number format, of which only affine has biases."""

    bits: int
    group_size: int
    mode: str = "affine"

    @property
    def parts(self) -> tuple[str, ...]:
        """What a packed matrix has beside its weight."""
        return PACKED if self.mode == "affine" else PACKED[:1]

    def pack(self, rows: mx.array) -> dict[str, mx.array]:
        """Rows of a matrix as "weight" and `parts`. Works on single rows: pieces give the same."""
        packed = mx.quantize(rows, group_size=self.group_size, bits=self.bits, mode=self.mode)
        return dict(zip(("weight", *self.parts), packed, strict=True))

    def unpack(self, weight: mx.array, scales: mx.array, biases: mx.array | None) -> mx.array:
        """The values, float32. Raises ValueError where the parts do not fit."""
        if self.mode == "affine" and biases is not None:
            scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        values = mx.dequantize(
            weight, scales, biases, group_size=self.group_size, bits=self.bits, mode=self.mode
        )
        return values.astype(mx.float32)


MODES = {
    "affine": Quantisation(4, 64),
    "mxfp4": Quantisation(4, 32, "mxfp4"),
    "nvfp4": Quantisation(4, 16, "nvfp4"),
    "mxfp8": Quantisation(8, 32, "mxfp8"),
}
"""MLX's number formats, each with what mlx-lm takes where nothing is asked for; all but affine have
one size only."""
MIXED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6)}
"""mlx-lm's mixed recipes: the bits of most matrices, and of those that suffer more."""


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
    size, or has one that cannot be.
    """
    width, vocabulary = _size(config, "d_model"), _size(config, "vocab_size")
    depths = {"encoder": _size(config, "num_layers")}
    depths["decoder"] = _size(config, "num_decoder_layers", depths["encoder"])
    if max(depths.values()) > MOST_LAYERS:
        raise CheckpointError(f"config.json asks for {max(depths.values())} layers: no T5 has them")
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
        numbers: list[Any] = [part.get(key) for key in ("bits", "group_size", "mode")]
        bits, group_size, mode = numbers
        if not is_known(Quantisation(bits, group_size, mode or "affine")):
            raise CheckpointError(
                f"config.json asks for {_short(part.get('bits'))} bits in groups of "
                f"{_short(part.get('group_size'))}: not a quantisation that MLX has"
            )
    return entry


def is_known(how: Quantisation) -> bool:
    """Whether MLX can pack so."""
    if type(how.bits) is not int or type(how.group_size) is not int:
        return False
    if how.mode == "affine":
        return how.bits in Q_BITS and how.group_size in Q_GROUP_SIZES
    return how in MODES.values()


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
    if type(value) is not int or not 1 <= value <= LARGEST:
        raise CheckpointError(
            f"config.json needs {name}, a whole number above 0, not {_short(value)}"
        )
    return value


def _short(value: Any) -> str:
    # A number of thousands of digits is none that Python writes out.
    return "one so large" if type(value) is int and value > LARGEST else f"{value!a:.40}"


def quantisation_of(
    config: Mapping[str, Any],
    key: str,
    shape: tuple[int, ...],
    default: Quantisation,
    mixed: str = "",
) -> Quantisation | None:
    """How one of a T5's weights is packed, None for what is left alone.

    Embedding and head get at least 8 bits, the rest what is asked for. mixed: a key of MIXED; the
    values of attention and the output of the feed-forward network then have its wider bits in some
    blocks, those that mlx-lm's recipes choose.
    """
    if not quantizable(config, key, shape, default.group_size):
        return None
    if is_encoder_decoder(config) and _WIDER.fullmatch(key):
        return _wider(default, shape)
    if mixed and _has_more_bits(config, key):
        return Quantisation(MIXED[mixed][1], default.group_size)
    return default


def _wider(default: Quantisation, shape: tuple[int, ...]) -> Quantisation:
    if default.mode == "affine":
        return Quantisation(max(default.bits, WIDER_BITS), default.group_size)
    wider = MODES["mxfp8"]
    return wider if shape[-1] % wider.group_size == 0 else default


_SENSITIVE = re.compile(r"(encoder|decoder)\.block\.(\d+)\..*\.(v|wo)\.weight")


def _has_more_bits(config: Mapping[str, Any], key: str) -> bool:
    """The first and the last eighth of a stack's blocks, and every third between."""
    found = _SENSITIVE.fullmatch(key)
    if found is None:
        return False
    depth = _size(config, "num_layers")
    if found[1] == "decoder":
        depth = _size(config, "num_decoder_layers", depth)
    block, eighth = int(found[2]), depth // 8
    return block < eighth or block >= 7 * depth // 8 or (block - eighth) % 3 == 2
