"""params.json of Meta's Llama -> config.json, and the tensors that follow from it: shapes, cuts,
order of rotary rows.

What is not known is refused by name, since it may change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....errors import CheckpointError
from ...disk.reading import read_json
from ...tensors import LARGEST_EXTENT, Malformed, naming

PARAMS = "params.json"
MOST_LAYERS = 10_000
_KNOWN = (
    "dim n_layers n_heads n_kv_heads head_dim hidden_dim vocab_size multiple_of ffn_dim_multiplier "
    "norm_eps rope_theta use_scaled_rope rope_scaling_factor max_seq_len max_batch_size "
    "model_parallel_size"
)
_SCALED_BY = 8.0
# Meta's params.json does not say that Llama 3.2's text models, (width, layers), are stretched
# further than 3.1's; Hugging Face's config.json of the same models does.
_STRETCHED = {(2048, 16): 32.0, (3072, 28): 32.0}
_TRAINED = 8192
_LENGTHS = {10_000.0: 4096, 1_000_000.0: 16384, 500_000.0: 8192}
_FIRST_LLAMA = 2048


def read_params(file: Path) -> dict[str, Any]:
    """config.json of the model, but for what the weights have to tell: the type of the elements,
    whether the head is the embedding, and often the number of tokens. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"{file.parent} lacks {file.name}: download it again")
    given = {key: value for key, value in read_json(file).items() if value is not None}
    unknown = sorted(key for key in given.keys() - {*_KNOWN.split()} if given[key] is not False)
    if unknown:
        raise CheckpointError(f"{file} asks for {unknown[0]!a:.60}, which is not supported here")
    with naming(file):
        return _config(given)


def _config(given: Mapping[str, Any]) -> dict[str, Any]:
    width, heads, layers = (_whole(given, key) for key in ("dim", "n_heads", "n_layers"))
    if "head_dim" not in given and width % heads:
        raise Malformed(f"asks for {heads} heads in a width of {width}")
    key_heads = _whole(given, "n_kv_heads", heads)
    if heads % key_heads:
        raise Malformed(f"asks for {heads} heads that share {key_heads} keys")
    head_width = _whole(given, "head_dim", width // heads)
    if head_width % 2:
        raise Malformed(f"asks for heads of width {head_width}, which cannot be rotated")
    if layers > MOST_LAYERS:
        raise Malformed(f"asks for {layers} layers")
    epsilon, theta = _number(given, "norm_eps", 1e-5), _number(given, "rope_theta", 10_000.0)
    scaled = given.get("use_scaled_rope", False)
    if type(scaled) is not bool:
        raise Malformed("asks for use_scaled_rope that is neither true nor false")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": _inner(given, width),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head_width,
        "max_position_embeddings": _length(given, epsilon, theta, scaled=scaled),
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
    }
    if given.get("vocab_size", -1) != -1:
        config["vocab_size"] = _whole(given, "vocab_size")
    if scaled:
        usual = _STRETCHED.get((width, layers), _SCALED_BY)
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": _number(given, "rope_scaling_factor", usual),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": _TRAINED,
        }
    return config


def _inner(given: Mapping[str, Any], width: int) -> int:
    """Two thirds of four widths, times a factor, rounded up to a multiple."""
    if "hidden_dim" in given:
        return _whole(given, "hidden_dim")
    multiple = _whole(given, "multiple_of", 256)
    inner = 8 * width // 3
    if "ffn_dim_multiplier" in given:
        inner = int(inner * _number(given, "ffn_dim_multiplier", 1.0))
    inner = -(-inner // multiple) * multiple
    if not 1 <= inner <= LARGEST_EXTENT:
        raise Malformed(f"asks for inner {inner}")
    return inner


def _length(given: Mapping[str, Any], epsilon: float, theta: float, *, scaled: bool) -> int:
    """Positions that the model was trained for: each generation has its own base of the rotation,
    and the first two differ in epsilon."""
    if "max_seq_len" in given:
        return _whole(given, "max_seq_len")
    if scaled:
        return 16 * _TRAINED
    if theta == 10_000.0 and epsilon <= 1e-6:
        return _FIRST_LLAMA
    return _LENGTHS.get(theta, min(_LENGTHS.values()))


def _whole(given: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = given.get(key, default)
    if type(value) is not int or not 1 <= value <= LARGEST_EXTENT:
        raise Malformed(f"needs {key}, a whole number above 0, not {value!a:.40}")
    return value


def _number(given: Mapping[str, Any], key: str, default: float) -> float:
    value = given.get(key, default)
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 < value <= 1e12:
        raise Malformed(f"needs {key}, a number above 0, not {value!a:.40}")
    return float(value)


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
