"""What tensors are called here, and which of them may be quantised. Data and small pure functions.

T5 keeps Hugging Face's names; decoder-only models keep theirs too, mlx-lm maps them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ..errors import CheckpointError

ENCODER_DECODER = ("t5", "mt5", "umt5")
Q_BITS = (2, 3, 4, 5, 6, 8)
Q_GROUP_SIZES = (32, 64, 128)

# Copies of shared.weight, and a bias that old checkpoints hold and no T5 uses.
_DROPPED = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)
# Tables of positions are tiny, and their error would go into every attention score.
_KEPT = re.compile(r"relative_attention_bias")


def is_encoder_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a configuration describes a model of the T5 family."""
    return config.get("model_type") in ENCODER_DECODER


def translate(config: Mapping[str, Any], key: str) -> str | None:
    """Our name of a checkpoint's tensor, None for one that is left out."""
    if is_encoder_decoder(config) and _DROPPED.fullmatch(key):
        return None
    return key


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


def quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The "quantization" entry of a converted model, None where it is not quantised.

    Raises CheckpointError for bits or a group size that MLX does not have.
    """
    entry = config.get("quantization")
    if entry is None:
        return None
    if not isinstance(entry, Mapping):
        raise CheckpointError("config.json has a quantization entry that is no object")
    if entry.get("bits") not in Q_BITS or entry.get("group_size") not in Q_GROUP_SIZES:
        raise CheckpointError(
            f"config.json asks for {entry.get('bits')} bits in groups of "
            f"{entry.get('group_size')}: not a quantisation that MLX has"
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
