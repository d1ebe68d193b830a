"""One block of a DFlash as its authors have it, in NumPy and float64, from the beginning.

Written from the papers and the authors' description of their files, without this package's modules.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * weight


def turned(x: Array, positions: Array, theta: float, interleaved: bool) -> Array:
    """Rotary positions of (heads, rows, width)."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    result = np.empty_like(x)
    first, second = (
        (np.s_[..., 0::2], np.s_[..., 1::2])
        if interleaved
        else (np.s_[..., :half], np.s_[..., half:])
    )
    result[first] = x[first] * cos - x[second] * sin
    result[second] = x[second] * cos + x[first] * sin
    return result


def by_head(x: Array, width: int) -> Array:
    return x.reshape(x.shape[0], -1, width).swapaxes(0, 1)


def softmax(scores: Array) -> Array:
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return scores / scores.sum(axis=-1, keepdims=True)


def encoder_attention(
    tensors: Mapping[str, Array],
    path: str,
    config: Mapping[str, Any],
    states: Array,
    encoded: Array,
) -> Array:
    """What the attention of a layer to the encoder's output (n, width) adds to (rows, width)."""
    width = config["head_dim"]
    layer = {name.removeprefix(path): each for name, each in tensors.items() if path in name}
    normed = norm(states, layer["encoder_attn_layernorm.weight"], config["rms_norm_eps"])
    source = norm(encoded, tensors["encoder_norm.weight"], config["rms_norm_eps"])
    queries, keys, values = (
        by_head(x @ layer[f"encoder_attn.{name}_proj.weight"].T, width)
        for name, x in (("q", normed), ("k", source), ("v", source))
    )
    groups = len(queries) // len(keys)
    keys, values = (np.repeat(each, groups, axis=0) for each in (keys, values))
    mixed = softmax(queries @ keys.swapaxes(1, 2) * width**-0.5) @ values
    return mixed.swapaxes(0, 1).reshape(len(states), -1) @ layer["encoder_attn.o_proj.weight"].T


def block(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    hidden: Array,
    embedded: Array,
    encoded: Array | None = None,
) -> Array:
    """What the last norm puts out for each slot. hidden: (rows, states x width), of the target.
    embedded: (slots, width). encoded: (n, width), the encoder's output."""
    eps, width, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]
    interleaved = not config.get("rope_is_neox_style", True)
    context = norm(hidden @ tensors["fc.weight"].T, tensors["hidden_norm.weight"], eps)
    rows, slots = len(context), len(embedded)
    places = np.arange(rows + slots)
    own = places[rows:, None]
    states = embedded
    for number, kind in enumerate(config["layer_types"]):
        layer = {
            name.removeprefix(f"layers.{number}."): array
            for name, array in tensors.items()
            if name.startswith(f"layers.{number}.")
        }

        def made(x: Array, name: str, layer: Mapping[str, Array] = layer) -> Array:
            heads = by_head(x @ layer[f"self_attn.{name}_proj.weight"].T, width)
            if name == "v":
                return heads
            return norm(heads, layer[f"self_attn.{name}_norm.weight"], eps)

        normed = norm(states, layer["input_layernorm.weight"], eps)
        both = np.concatenate([context, normed])
        queries = turned(made(normed, "q"), places[rows:], theta, interleaved)
        keys = turned(made(both, "k"), places, theta, interleaved)
        groups = len(queries) // len(keys)
        keys, values = (np.repeat(each, groups, axis=0) for each in (keys, made(both, "v")))
        scores = queries @ keys.swapaxes(1, 2) * width**-0.5
        sliding = kind == "sliding_attention"
        seen = np.ones((slots, rows + slots), dtype=bool)
        if config.get("is_causal", sliding):
            seen &= places <= own
        if sliding:
            seen &= own - places < config["sliding_window"]
        scores = softmax(np.where(seen, scores, -np.inf))
        attended = (scores @ values).swapaxes(0, 1).reshape(slots, -1)
        states = states + attended @ layer["self_attn.o_proj.weight"].T
        if encoded is not None:
            states = states + encoder_attention(
                tensors, f"layers.{number}.", config, states, encoded
            )
        normed = norm(states, layer["post_attention_layernorm.weight"], eps)
        gate = normed @ layer["mlp.gate_proj.weight"].T
        inner = gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj.weight"].T)
        states = states + inner @ layer["mlp.down_proj.weight"].T
    return norm(states, tensors["norm.weight"], eps)
