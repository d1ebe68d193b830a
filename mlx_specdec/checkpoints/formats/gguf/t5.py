"""GGUF files of the T5 family: T5, Flan-T5, mT5, UMT5 and their kin, all called t5 there.

Knows what llama.cpp calls their tensors and keys and what Hugging Face does. The file does not say
whether the head is tied, and so whether the decoder's output is scaled: both are told from the
tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ... import keys
from .header import Damaged
from .layout import Finder, Layout, Read, check_layers
from .metadata import Metadata

_STACKS = {"encoder": "enc", "decoder": "dec"}
_HEAD, _EMBEDDING = "output.weight", "token_embd.weight"
_SAMPLED_ROWS = 256
_SAME_DIRECTION = 0.8
"""Above this cosine a head is the embedding, packed another way; trained apart they are near 0."""


def t5_layout(metadata: Metadata, finder: Finder, read: Read) -> Layout:
    """Raises Damaged for what is missing, contradicts itself or is not supported."""
    layers = check_layers(metadata.count(".block_count"), finder.entries)
    decoder_layers = check_layers(metadata.count(".decoder_block_count", layers), finder.entries)
    if "dec.blk.0.attn_norm.weight" not in finder.entries:
        raise Damaged("holds an encoder alone, which cannot generate text")
    own_head = _has_own_head(finder, read)
    config = _config(metadata, finder, layers, decoder_layers, own_head)
    for ours, shape in keys.t5_shapes(config, own_head=own_head).items():
        finder.take(ours, _name(ours), shape)
    return finder.finish(config, left=_left(finder, decoder_layers, own_head))


def _config(
    metadata: Metadata, finder: Finder, layers: int, decoder_layers: int, own_head: bool
) -> dict[str, Any]:
    every_layer = layers > 1 and "enc.blk.1.attn_rel_b.weight" in finder.entries
    gated = "enc.blk.0.ffn_gate.weight" in finder.entries
    model_type = "umt5" if every_layer else "t5"
    return {
        "model_type": model_type,
        "architectures": [f"{model_type.upper()}ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "vocab_size": finder.shape(_EMBEDDING)[0],
        "d_model": metadata.count(".embedding_length"),
        "d_kv": metadata.count(".attention.key_length"),
        "d_ff": metadata.count(".feed_forward_length"),
        "num_layers": layers,
        "num_decoder_layers": decoder_layers,
        "num_heads": metadata.count(".attention.head_count"),
        "relative_attention_num_buckets": metadata.count(".attention.relative_buckets_count"),
        # llama.cpp computes with these two whatever the original had.
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "layer_norm_epsilon": metadata.positive(
            ".attention.layer_norm_rms_epsilon",
            metadata.positive(".attention.layer_norm_epsilon", 1e-6),
        ),
        "decoder_start_token_id": metadata.count(".decoder_start_token_id", 0),
        "pad_token_id": metadata.count("tokenizer.ggml.padding_token_id", 0),
        "eos_token_id": metadata.count("tokenizer.ggml.eos_token_id", 1),
        "tie_word_embeddings": not own_head,
        "scale_decoder_outputs": not own_head,
    }


def _has_own_head(finder: Finder, read: Read) -> bool:
    """Whether there is a head that is more than a copy of the embedding."""
    if _HEAD not in finder.entries:
        return False
    if finder.shape(_HEAD) != finder.shape(_EMBEDDING):
        raise Damaged(f"is damaged: {_HEAD} and {_EMBEDDING} differ in shape")
    head, embedding = read(_HEAD, _SAMPLED_ROWS), read(_EMBEDDING, _SAMPLED_ROWS)
    with np.errstate(all="ignore"):
        lengths = float(np.linalg.norm(head)) * float(np.linalg.norm(embedding))
        return not float((head * embedding).sum()) > _SAME_DIRECTION * lengths


def _left(finder: Finder, decoder_layers: int, own_head: bool) -> tuple[str, ...]:
    """A copy of the embedding, and the bias of cross attention that old checkpoints hold."""
    names = [f"dec.blk.{number}.cross_attn_rel_b.weight" for number in range(decoder_layers)]
    return (*([] if own_head else [_HEAD]), *names)


_ATTENTION: Mapping[str, str] = {
    "SelfAttention.q": "attn_q",
    "SelfAttention.k": "attn_k",
    "SelfAttention.v": "attn_v",
    "SelfAttention.o": "attn_o",
    "SelfAttention.relative_attention_bias": "attn_rel_b",
    "EncDecAttention.q": "cross_attn_q",
    "EncDecAttention.k": "cross_attn_k",
    "EncDecAttention.v": "cross_attn_v",
    "EncDecAttention.o": "cross_attn_o",
    "DenseReluDense.wi": "ffn_up",
    "DenseReluDense.wi_0": "ffn_gate",
    "DenseReluDense.wi_1": "ffn_up",
    "DenseReluDense.wo": "ffn_down",
}
_NORMS = {
    "encoder": ("attn_norm", "ffn_norm"),
    "decoder": ("attn_norm", "cross_attn_norm", "ffn_norm"),
}


def _name(ours: str) -> str:
    """llama.cpp's name of one of a T5's tensors."""
    if ours == keys.SHARED:
        return _EMBEDDING
    if ours == keys.HEAD:
        return _HEAD
    parts = ours.removesuffix(".weight").split(".")
    stack = _STACKS[parts[0]]
    if parts[1] == "final_layer_norm":
        return f"{stack}.output_norm.weight"
    _, _, block, _, layer, *rest = parts
    last = ".".join(rest)
    theirs = _NORMS[parts[0]][int(layer)] if last == "layer_norm" else _ATTENTION[last]
    return f"{stack}.blk.{block}.{theirs}.weight"
