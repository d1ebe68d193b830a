"""Decoder-only GGUF files: llama (Llama, Mistral, Mixtral, TinyLlama, ...), qwen2 and qwen3.

Knows what llama.cpp calls their tensors and keys and what Hugging Face does. Reads nothing but
Llama 3's rotary factors, which configurations say in four numbers and GGUF as a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .header import Damaged
from .layout import Finder, Layout, Read, check_layers
from .metadata import Metadata

_FACTORS = "rope_freqs.weight"
_ORIGINAL_LENGTH, _LOW, _HIGH = 8192, 1.0, 4.0
"""Of Llama 3.1's rotary scaling, the same in all of its models."""


@dataclass(frozen=True)
class _Family:
    """What one architecture has. permuted: llama.cpp stores the rows of its rotary heads in the
    order of Meta's code. theta: the rotary base where the file is silent."""

    model_type: str
    architecture: str
    permuted: bool = False
    theta: float = 10000.0
    biases: tuple[str, ...] = ()
    head_norms: bool = False
    own_head_dim: bool = True


FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": _Family(
        "qwen2",
        "Qwen2ForCausalLM",
        biases=("q", "k", "v"),
        own_head_dim=False,
    ),
    "qwen3": _Family("qwen3", "Qwen3ForCausalLM", head_norms=True),
}


def decoder_only_layout(metadata: Metadata, finder: Finder, read: Read) -> Layout:
    """Raises Damaged for what is missing, contradicts itself or is not supported."""
    family = FAMILIES[metadata.architecture]
    sizes = _sizes(metadata, finder)
    config = _config(metadata, family, sizes)
    tied = not finder.take_if_there(
        "lm_head.weight", "output.weight", (sizes["vocab_size"], sizes["hidden_size"])
    )
    finder.take(
        "model.embed_tokens.weight",
        "token_embd.weight",
        (sizes["vocab_size"], sizes["hidden_size"]),
    )
    finder.take("model.norm.weight", "output_norm.weight", (sizes["hidden_size"],))
    for number in range(sizes["num_hidden_layers"]):
        _attention(finder, family, sizes, number)
        _feed_forward(finder, sizes, number)
    config["tie_word_embeddings"] = tied
    if family.model_type == "llama" and not sizes["num_local_experts"]:
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in finder.places
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in finder.places
    scaling = _scaling(metadata, finder, read, sizes["head_dim"], config["rope_theta"])
    if scaling is not None:
        if sizes["num_local_experts"]:
            raise Damaged("scales the rotary positions of a Mixtral, which mlx-lm does not")
        config["rope_scaling"] = scaling
    return finder.finish(config, left=(_FACTORS,))


def _sizes(metadata: Metadata, finder: Finder) -> dict[str, int]:
    heads = metadata.count(".attention.head_count")
    shape = finder.shape("token_embd.weight")
    hidden = metadata.count(".embedding_length")
    inner = metadata.count(".feed_forward_length")
    if len(shape) != 2 or not (heads and hidden and inner):
        raise Damaged(
            f"is damaged: {heads} heads, widths {hidden} and {inner}, embeddings of shape {shape}"
        )
    width = metadata.count(".attention.key_length", hidden // heads)
    if width != metadata.count(".attention.value_length", width):
        raise Damaged("has keys and values of different widths, which is not supported")
    if width % 2 or width < 2 or width != metadata.count(".rope.dimension_count", width):
        raise Damaged("turns only part of each head's width, which is not supported")
    key_heads = metadata.count(".attention.head_count_kv", heads)
    if not key_heads or heads % key_heads:
        raise Damaged(f"is damaged: {heads} heads cannot share {key_heads} heads of keys")
    layers = check_layers(metadata.count(".block_count"), finder.entries)
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": width,
        "vocab_size": shape[0],
        "num_local_experts": metadata.count(".expert_count", 0),
    }


def _config(metadata: Metadata, family: _Family, sizes: Mapping[str, int]) -> dict[str, Any]:
    config: dict[str, Any] = {
        **sizes,
        "model_type": family.model_type,
        "architectures": [family.architecture],
        "hidden_act": "silu",
        "max_position_embeddings": metadata.count(".context_length"),
        "rms_norm_eps": metadata.positive(".attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.positive(".rope.freq_base", family.theta),
    }
    own_width = sizes["head_dim"] * sizes["num_attention_heads"] != sizes["hidden_size"]
    if sizes["num_local_experts"]:
        if family.model_type != "llama":
            raise Damaged(f"has experts, which {family.model_type} does not have here")
        used = config["num_experts_per_tok"] = metadata.count(".expert_used_count")
        if not 1 <= used <= sizes["num_local_experts"]:
            raise Damaged(f"is damaged: it uses {used} of {sizes['num_local_experts']} experts")
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    else:
        del config["num_local_experts"]
    if sizes["num_local_experts"] or not family.own_head_dim:
        if own_width:
            raise Damaged("has heads that do not add up to its width, which is not supported")
        del config["head_dim"]
    return config


def _attention(finder: Finder, family: _Family, sizes: Mapping[str, int], number: int) -> None:
    ours, theirs = f"model.layers.{number}", f"blk.{number}"
    hidden, width = sizes["hidden_size"], sizes["head_dim"]
    finder.take(f"{ours}.input_layernorm.weight", f"{theirs}.attn_norm.weight", (hidden,))
    finder.take(f"{ours}.post_attention_layernorm.weight", f"{theirs}.ffn_norm.weight", (hidden,))
    queries, keys = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    for part, heads in (("q", queries), ("k", keys), ("v", keys)):
        turned = heads if family.permuted and part != "v" else 0
        to, source = f"{ours}.self_attn.{part}_proj", f"{theirs}.attn_{part}"
        finder.take(f"{to}.weight", f"{source}.weight", (heads * width, hidden), turned)
        bias = finder.take if part in family.biases else finder.take_if_there
        bias(f"{to}.bias", f"{source}.bias", (heads * width,), turned)
    output = f"{ours}.self_attn.o_proj"
    finder.take(f"{output}.weight", f"{theirs}.attn_output.weight", (hidden, queries * width))
    finder.take_if_there(f"{output}.bias", f"{theirs}.attn_output.bias", (hidden,))
    if family.head_norms:
        for part in "qk":
            norm = f"{ours}.self_attn.{part}_norm.weight"
            finder.take(norm, f"{theirs}.attn_{part}_norm.weight", (width,))


def _feed_forward(finder: Finder, sizes: Mapping[str, int], number: int) -> None:
    theirs = f"blk.{number}.ffn"
    hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    experts = sizes["num_local_experts"]
    if not experts:
        for part, shape in shapes.items():
            ours = f"model.layers.{number}.mlp.{part}_proj"
            finder.take(f"{ours}.weight", f"{theirs}_{part}.weight", shape)
            finder.take_if_there(f"{ours}.bias", f"{theirs}_{part}.bias", shape[:1])
        return
    ours = f"model.layers.{number}.block_sparse_moe"
    finder.take(f"{ours}.gate.weight", f"{theirs}_gate_inp.weight", (experts, hidden))
    for (part, shape), old in zip(shapes.items(), ("w1", "w3", "w2"), strict=True):
        joined = f"{theirs}_{part}_exps.weight"
        if finder.take_if_there(f"{ours}.switch_mlp.{part}_proj.weight", joined, (experts, *shape)):
            continue
        if f"{theirs}_{part}.0.weight" not in finder.entries:
            raise Damaged(f"lacks the tensor {joined}: download it again")
        # Files of 2023 hold each expert by itself.
        for expert in range(check_layers(experts, finder.entries)):
            name = f"{theirs}_{part}.{expert}.weight"
            finder.take(f"{ours}.experts.{expert}.{old}.weight", name, shape)


def _scaling(
    metadata: Metadata, finder: Finder, read: Read, width: int, theta: float
) -> dict[str, Any] | None:
    """rope_scaling, None where positions are not scaled."""
    kind = metadata.text(".rope.scaling.type", "none")
    factor = metadata.number(".rope.scaling.factor", metadata.number(".rope.scale_linear", 1.0))
    if factor < 0:
        raise Damaged(f"is damaged: it scales rotary positions by {factor}")
    if _FACTORS in finder.entries:
        if finder.shape(_FACTORS) != (width // 2,):
            raise Damaged(f"is damaged: {_FACTORS} has shape {finder.shape(_FACTORS)}")
        return _llama3(read(_FACTORS, width // 2), width, theta)
    if kind not in ("none", "linear"):
        raise Damaged(f"scales rotary positions by {kind!r:.40}, which is not supported")
    return None if factor in (0, 1) else {"rope_type": "linear", "type": "linear", "factor": factor}


def _llama3(factors: np.ndarray[Any, Any], width: int, theta: float) -> dict[str, Any] | None:
    """Llama 3.1's four numbers for `factors`, by which each frequency is divided.

    They are computed and held to the file's. Raises Damaged where those come from anything else.
    """
    if (factors == 1).all():
        return None
    factor = float(factors.max())
    with np.errstate(all="ignore"):  # what does not make sense does not fit
        waves = 2 * np.pi * theta ** (np.arange(0, width, 2) / width)
        smooth = np.clip((_ORIGINAL_LENGTH / waves - _LOW) / (_HIGH - _LOW), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise Damaged(f"has {_FACTORS} that are not those of Llama 3.1, which is not supported")
    return {
        "rope_type": "llama3",
        "factor": round(factor, 4),
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _ORIGINAL_LENGTH,
    }
