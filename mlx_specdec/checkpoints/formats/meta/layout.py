"""Meta's Llama in Hugging Face's words: names, shapes and the order of the rotary rows.

Knows what its tensors are called by both, and along which axis tensor-parallel parts are cut. Data
and small pure functions; knows nothing of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..malformed import Malformed

EMBEDDING, HEAD, NORM = "tok_embeddings.weight", "output.weight", "norm.weight"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MOST_LAYERS = 10_000
LARGEST = 2**31 - 1


@dataclass(frozen=True)
class Sizes:
    """What the shapes of a Llama's tensors follow from. heads_width: of one attention head."""

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int

    def check(self) -> None:
        """Raises Malformed where no Llama can have these sizes."""
        for name, value in vars(self).items():
            if not 1 <= value <= LARGEST:
                raise Malformed(f"asks for {name.replace('_', ' ')} {value}")
        if self.layers > MOST_LAYERS:
            raise Malformed(f"asks for {self.layers} layers")
        if self.heads % self.kv_heads:
            raise Malformed(f"asks for {self.heads} heads that share {self.kv_heads} keys")
        if self.head_width % 2:
            raise Malformed(f"asks for heads of width {self.head_width}, which cannot be rotated")


@dataclass(frozen=True)
class Entry:
    """One tensor. theirs: Meta's name. axis: along which parts are joined, None where each part
    has the whole. heads: its rows are those of so many rotated heads, 0 where they are not."""

    theirs: str
    shape: tuple[int, ...]
    axis: int | None
    heads: int = 0


def entries(sizes: Sizes) -> dict[str, Entry]:
    """Every tensor by Hugging Face's name, the output head among them.

    The axis of the embedding is Llama 3's; earlier ones cut it along the other.
    """
    whole = (sizes.vocabulary, sizes.width)
    found = {"model.embed_tokens.weight": Entry(EMBEDDING, whole, 0)}
    for layer in range(sizes.layers):
        for ours, entry in _layer(sizes):
            found[f"model.layers.{layer}.{ours}.weight"] = Entry(
                f"layers.{layer}.{entry.theirs}.weight", entry.shape, entry.axis, entry.heads
            )
    found["model.norm.weight"] = Entry(NORM, (sizes.width,), None)
    found["lm_head.weight"] = Entry(HEAD, whole, 0)
    return found


def _layer(sizes: Sizes) -> Iterator[tuple[str, Entry]]:
    width, inner = sizes.width, sizes.inner
    queries, keys = sizes.heads * sizes.head_width, sizes.kv_heads * sizes.head_width
    yield "input_layernorm", Entry("attention_norm", (width,), None)
    yield "self_attn.q_proj", Entry("attention.wq", (queries, width), 0, sizes.heads)
    yield "self_attn.k_proj", Entry("attention.wk", (keys, width), 0, sizes.kv_heads)
    yield "self_attn.v_proj", Entry("attention.wv", (keys, width), 0)
    yield "self_attn.o_proj", Entry("attention.wo", (width, queries), 1)
    yield "post_attention_layernorm", Entry("ffn_norm", (width,), None)
    yield "mlp.gate_proj", Entry("feed_forward.w1", (inner, width), 0)
    yield "mlp.down_proj", Entry("feed_forward.w2", (width, inner), 1)
    yield "mlp.up_proj", Entry("feed_forward.w3", (inner, width), 0)


def rotary_rows(begin: int, end: int, head_width: int) -> np.ndarray[Any, Any]:
    """Where rows begin .. end - 1 of Hugging Face's order lie in Meta's, which is llama.cpp's too.

    Meta rotates neighbours: rows 2i and 2i + 1 of a head make a pair. Hugging Face rotates halves:
    the first of each pair come first, then the second of each.
    """
    rows = np.arange(begin, end)
    head, inside = np.divmod(rows, head_width)
    half, pair = np.divmod(inside, head_width // 2)
    return head * head_width + 2 * pair + half


def configuration(
    sizes: Sizes, *, stored: str, epsilon: float, theta: float, length: int, tied: bool
) -> dict[str, Any]:
    """config.json. stored: type of the matrices as a safetensors file names it. length: positions
    that the model was trained for."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": length,
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "tie_word_embeddings": tied,
        "torch_dtype": _DTYPES[stored],
    }
