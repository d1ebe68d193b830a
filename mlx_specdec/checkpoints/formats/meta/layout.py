"""The tensors of Meta's Llama under Hugging Face's names: shapes, cuts, order of rotary rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

EMBEDDING, HEAD = "tok_embeddings.weight", "output.weight"


@dataclass(frozen=True)
class Entry:
    """One tensor. theirs: Meta's name. axis: along which tensor-parallel parts are joined, None
    where each has the whole. heads: its rows are those of so many rotated heads, 0 where they are
    not."""

    theirs: str
    shape: tuple[int, ...]
    axis: int | None
    heads: int = 0


def entries(config: Mapping[str, Any]) -> dict[str, Entry]:
    """Every tensor by Hugging Face's name, the output head among them. config: config.json.

    The axis of the embedding is Llama 3's; earlier ones cut it along the other.
    """
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    queries, keys = heads * config["head_dim"], key_heads * config["head_dim"]
    whole = (config["vocab_size"], width)
    named = {"model.embed_tokens.weight": Entry(EMBEDDING, whole, 0)}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, shape, axis, rotated in (
            ("input_layernorm", "attention_norm", (width,), None, 0),
            ("self_attn.q_proj", "attention.wq", (queries, width), 0, heads),
            ("self_attn.k_proj", "attention.wk", (keys, width), 0, key_heads),
            ("self_attn.v_proj", "attention.wv", (keys, width), 0, 0),
            ("self_attn.o_proj", "attention.wo", (width, queries), 1, 0),
            ("post_attention_layernorm", "ffn_norm", (width,), None, 0),
            ("mlp.gate_proj", "feed_forward.w1", (inner, width), 0, 0),
            ("mlp.down_proj", "feed_forward.w2", (width, inner), 1, 0),
            ("mlp.up_proj", "feed_forward.w3", (inner, width), 0, 0),
        ):
            entry = Entry(f"layers.{layer}.{theirs}.weight", shape, axis, rotated)
            named[f"model.layers.{layer}.{ours}.weight"] = entry
    named["model.norm.weight"] = Entry("norm.weight", (width,), None)
    named["lm_head.weight"] = Entry(HEAD, whole, 0)
    return named


def rotary_rows(begin: int, end: int, head_width: int) -> np.ndarray[Any, Any]:
    """Where rows begin .. end - 1 of Hugging Face's order lie in Meta's, which is llama.cpp's too.

    Meta rotates neighbours: rows 2i and 2i + 1 of a head make a pair. Hugging Face rotates halves:
    the first of each pair come first, then the second of each.
    """
    rows = np.arange(begin, end)
    head, inside = np.divmod(rows, head_width)
    half, pair = np.divmod(inside, head_width // 2)
    return head * head_width + 2 * pair + half
