"""What a T5's tensors are called, their shapes, and which of them may be quantized, and how."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .quantization import MIXED, MODES, Quantization
from .quantization import PARTS as QUANTIZED_PARTS

T5 = ("t5", "mt5", "umt5")
"""model_type of a T5."""
SHARED, HEAD = "shared.weight", "lm_head.weight"
TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
LARGEST = 2**31 - 1
"""Extent of an array that MLX has."""
MOST_LAYERS = 1_000
"""Of a stack; more would only build for minutes."""

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
_WIDER = re.compile(r"(.*\.)?(shared|embed_tokens|lm_head)\.weight")
WIDER_BITS = 8
# Tables of positions are tiny, and their error would go into every attention score.
_NEVER = re.compile(r"relative_attention_bias|embed_positions")
_SENSITIVE = re.compile(
    r"(?:model\.)?(encoder|decoder)\.(?:block|layers)\.(\d+)\.(?:.*\.)?(v|wo|v_proj|fc2)\.weight"
)


def names(stored: Iterable[str]) -> dict[str, str]:
    """The tensors that a T5 reads: its name -> the checkpoint's. `shared` may be stored under the
    names of its copies alone."""
    stored = list(stored)
    read = {key: key for key in stored if not _DROPPED.fullmatch(key)}
    twins = [key for key in TWINS if key in stored]
    if SHARED not in read and twins:
        read[SHARED] = twins[0]
    return read


def without_head(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The same without the output head, quantized or not."""
    head = {f"lm_head.{part}" for part in ("weight", *QUANTIZED_PARTS)}
    return {name: each for name, each in weights.items() if name not in head}


def feed_forward(config: Mapping[str, Any]) -> str:
    """A T5's kind of feed-forward network; where config.json is silent, what transformers takes."""
    silent = "relu" if config.get("model_type") == "t5" else "gated-gelu"
    return str(config.get("feed_forward_proj") or silent)


def scales_output(config: Mapping[str, Any]) -> bool:
    """Return whether a T5 scales the decoder's output by d_model ** -0.5 before the head.

    Not the same as whether the head is tied: transformers 5 writes tie_word_embeddings: true for
    every T5 that it saves, and says the scaling in scale_decoder_outputs."""
    said = config.get("scale_decoder_outputs")
    if said is not None:
        return bool(said)
    if config.get("model_type") == "mt5":
        return False
    return config.get("tie_word_embeddings") is not False


def whole_number(
    config: Mapping[str, Any], name: str, default: int | None = None, most: int = LARGEST
) -> int:
    """A size in config.json, from 1 to `most`. Raises CheckpointError for what is none."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= most:
        raise CheckpointError(
            f"config.json has {name} {value!a:.40}: need a number from 1 to {most}"
        )
    return value


def quantizable(key: str, shape: tuple[int, ...], group_size: int) -> bool:
    """Return whether to quantize a weight: a matrix of whole groups, but not of positions."""
    return (
        key.endswith(".weight")
        and len(shape) == 2
        and shape[-1] % group_size == 0
        and not _NEVER.search(key)
    )


def quantization_of(
    config: Mapping[str, Any],
    key: str,
    shape: tuple[int, ...],
    default: Quantization,
    mixed: str = "",
) -> Quantization | None:
    """Return how to quantize one of a T5's weights, None for not at all.

    Embedding and head get at least 8 bits. mixed: a key of MIXED, whose wider bits go where
    mlx-lm's predicates have them: the values of attention and what follows the feed-forward
    network."""
    if not quantizable(key, shape, default.group_size):
        return None
    if _WIDER.fullmatch(key):
        if default.mode == "affine":
            return Quantization(max(default.bits, WIDER_BITS), default.group_size)
        wider = MODES["mxfp8"]
        return wider if shape[-1] % wider.group_size == 0 else default
    if mixed and _has_more_bits(config, key):
        return Quantization(MIXED[mixed][1], default.group_size)
    return default


def _has_more_bits(config: Mapping[str, Any], key: str) -> bool:
    """The first and the last eighth of a stack's blocks, and every third between."""
    part = _SENSITIVE.fullmatch(key)
    if part is None:
        return False
    own = config.get("num_decoder_layers") if part[1] == "decoder" else None
    depth = config.get(f"{part[1]}_layers") or own or config["num_layers"]
    block, eighth = int(part[2]), depth // 8
    return block < eighth or block >= 7 * depth // 8 or (block - eighth) % 3 == 2


_ENCODER = re.compile(r"(.*\.)?encoder\.(block|layers)\.")
_DECODER = re.compile(r"(.*\.)?decoder\.(block|layers)\.")
_LABELS = ("classification_head.", "classifier.", "qa_outputs.")
"""Heads that say a label or a place and never a word."""


def check_generates(directory: Path, config: Mapping[str, Any], stored: Iterable[str]) -> None:
    """Raises CheckpointError for a T5 that has no decoder, or a head for something else than text.

    stored: names of all tensors. Copied configurations name the wrong architecture, so it is only
    shown."""
    names, listed = list(stored), config.get("architectures")
    shown = f" ({str(listed[0])[:80]})" if isinstance(listed, list) and listed else ""
    if any(name.startswith(_LABELS) for name in names):
        raise CheckpointError(f"{directory} holds a model that gives labels{shown}, not text")
    if any(map(_ENCODER.match, names)) and not any(map(_DECODER.match, names)):
        raise CheckpointError(f"{directory} holds an encoder alone{shown}: take the whole model")
