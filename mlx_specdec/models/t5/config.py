"""config.json of a T5 -> its shapes and facts, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...checkpoints.files import whole_number
from ...checkpoints.tensors import LARGEST_EXTENT, MOST_LAYERS
from ...errors import CheckpointError

TRAINED_LENGTH, LONGER = 512, 1024
"""Tokens of a text in pretraining, where config.json does not say: of T5 (Raffel et al., arXiv
1910.10683, section 3.1.2), and of mT5 (2010.11934), its successor UMT5, and ByT5 (2105.13626)."""
FEED_FORWARDS = ("relu", "gelu", "silu", "gated-relu", "gated-gelu", "gated-silu")


@dataclass(frozen=True)
class T5Config:
    """Shapes and facts of one T5. own_head: whether lm_head is not tied to shared.
    trained_length: of the sources in training, in tokens."""

    vocab_size: int
    d_model: int
    d_kv: int
    d_ff: int
    num_heads: int
    num_layers: int
    num_decoder_layers: int
    num_buckets: int
    max_distance: int
    epsilon: float
    feed_forward: str
    decoder_start_token_id: int
    bias_per_layer: bool
    scales_output: bool
    own_head: bool
    trained_length: int = TRAINED_LENGTH

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], *, own_head: bool) -> T5Config:
        # Where config.json is silent, what transformers takes.
        silent = "relu" if config.get("model_type") == "t5" else "gated-gelu"
        kind = str(config.get("feed_forward_proj") or silent)
        if kind not in FEED_FORWARDS:
            raise CheckpointError(
                f"config.json has feed_forward_proj {kind!r}; supported are "
                f"{', '.join(FEED_FORWARDS)}"
            )
        if not isinstance(epsilon := config.get("layer_norm_epsilon", 1e-6), float):
            raise CheckpointError(
                f"config.json has layer_norm_epsilon {epsilon!r}: need a fraction"
            )
        names = ("vocab_size", "d_model", "d_kv", "d_ff", "num_heads")
        sizes = {name: whole_number(config, name) for name in names}
        layers = whole_number(config, "num_layers", most=MOST_LAYERS)
        count, farthest = _relative_positions(config)
        if sizes["num_heads"] * sizes["d_kv"] > LARGEST_EXTENT:
            raise CheckpointError("config.json asks for num_heads and d_kv that no model has")
        return cls(
            **sizes,
            num_layers=layers,
            num_decoder_layers=whole_number(config, "num_decoder_layers", layers, MOST_LAYERS),
            num_buckets=count,
            max_distance=farthest,
            epsilon=epsilon,
            feed_forward=kind,
            decoder_start_token_id=_start_token(config, sizes["vocab_size"]),
            bias_per_layer=config.get("model_type") == "umt5",
            scales_output=scales_output(config),
            own_head=own_head,
            trained_length=_trained_length(config),
        )


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


def _trained_length(config: Mapping[str, Any]) -> int:
    length = config.get("n_positions")
    if type(length) is int and length > 0:
        return length
    is_byt5 = config.get("tokenizer_class") == "ByT5Tokenizer"
    return LONGER if is_byt5 or config.get("model_type") in ("mt5", "umt5") else TRAINED_LENGTH


def _relative_positions(config: Mapping[str, Any]) -> tuple[int, int]:
    count = whole_number(config, "relative_attention_num_buckets", 32)
    farthest = whole_number(config, "relative_attention_max_distance", 128)
    if count < 4 or count % 2 or farthest <= count // 2:
        raise CheckpointError(
            f"config.json has {count} relative_attention_num_buckets up to distance {farthest}: "
            "need an even number from 4, and a distance above half of it"
        )
    return count, farthest


def _start_token(config: Mapping[str, Any], vocabulary: int) -> int:
    """T5 starts from its padding, unless config.json names another token."""
    named = (config.get(name) for name in ("decoder_start_token_id", "pad_token_id"))
    value = next((each for each in named if each is not None), 0)
    if type(value) is not int or not 0 <= value < vocabulary:
        raise CheckpointError(
            f"config.json has decoder_start_token_id {value!r}: need one of the {vocabulary} tokens"
        )
    return value
