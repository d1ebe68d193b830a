"""GGUF files of the T5 family: T5, Flan-T5, mT5, UMT5 and their kin, all called t5 there.

Whether the head is tied, and so whether the decoder's output is scaled, the tensors tell.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import keys
from ...tensors import Malformed
from .layout import COUNT, EMBEDDING, HEAD, POSITIVE, Finder, Metadata, Place, tensor_names

_SAMPLED_ROWS = 256
_SAME_DIRECTION = 0.8
"""Above this cosine a head is the embedding, packed another way; trained apart they are near 0."""


def describe_t5(metadata: Metadata, finder: Finder) -> dict[str, Any]:
    """config.json of the model, whose tensors `finder` gets. Raises Malformed."""
    layers = finder.check_layers(metadata.get(".block_count", COUNT))
    decoder_layers = finder.check_layers(metadata.get(".decoder_block_count", COUNT, layers))
    if "dec.blk.0.attn_norm.weight" not in finder.entries:
        raise Malformed("holds an encoder alone, which cannot generate text")
    own_head = _has_own_head(finder)
    config = _config(metadata, finder, layers, decoder_layers, own_head)
    theirs = tensor_names(metadata.architecture, max(layers, decoder_layers))
    for ours, shape in keys.t5_shapes(config, own_head=own_head).items():
        finder.take(ours, Place(theirs(ours), shape))
    # A copy of the embedding, and the bias of cross attention that old checkpoints hold.
    unused = [f"dec.blk.{number}.cross_attn_rel_b.weight" for number in range(decoder_layers)]
    finder.check_left(config["model_type"], HEAD, *unused)
    return config


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
        "vocab_size": finder.shape(EMBEDDING)[0],
        "d_model": metadata.get(".embedding_length", COUNT),
        "d_kv": metadata.get(".attention.key_length", COUNT),
        "d_ff": metadata.get(".feed_forward_length", COUNT),
        "num_layers": layers,
        "num_decoder_layers": decoder_layers,
        "num_heads": metadata.get(".attention.head_count", COUNT),
        "relative_attention_num_buckets": metadata.get(".attention.relative_buckets_count", COUNT),
        # llama.cpp computes with these two whatever the original had.
        "relative_attention_max_distance": 128,
        "feed_forward_proj": "gated-gelu" if gated else "relu",
        "layer_norm_epsilon": metadata.get(
            ".attention.layer_norm_rms_epsilon",
            POSITIVE,
            metadata.get(".attention.layer_norm_epsilon", POSITIVE, 1e-6),
        ),
        "decoder_start_token_id": metadata.get(".decoder_start_token_id", COUNT, 0),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id", COUNT, 0),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id", COUNT, 1),
        "tie_word_embeddings": not own_head,
        "scale_decoder_outputs": not own_head,
    }


def _has_own_head(finder: Finder) -> bool:
    """Whether there is a head that is more than a copy of the embedding."""
    if HEAD not in finder.entries:
        return False
    if finder.shape(HEAD) != finder.shape(EMBEDDING):
        raise Malformed(f"is damaged: {HEAD} and {EMBEDDING} differ in shape")
    head, embedding = (finder.read(name, _SAMPLED_ROWS) for name in (HEAD, EMBEDDING))
    with np.errstate(all="ignore"):
        lengths = float(np.linalg.norm(head)) * float(np.linalg.norm(embedding))
        return not float((head * embedding).sum()) > _SAME_DIRECTION * lengths
