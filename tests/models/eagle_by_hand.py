"""What an EAGLE-1 drafts, in NumPy and float64, from the beginning for each token.

Written from the authors' description of their files, without this package's modules.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .dflash_by_hand import Array, by_head, norm, turned


def layer(tensors: Mapping[str, Array], config: Mapping[str, Any], x: Array) -> Array:
    """The one layer, which has no norm before its attention. x: (rows, width)."""
    eps, width, theta = config["rms_norm_eps"], config["head_dim"], config["rope_theta"]

    def through(rows: Array, name: str) -> Array:
        return rows @ tensors[f"layers.0.{name}.weight"].T

    places = np.arange(len(x))
    queries = turned(by_head(through(x, "self_attn.q_proj"), width), places, theta, False)
    keys = turned(by_head(through(x, "self_attn.k_proj"), width), places, theta, False)
    values = by_head(through(x, "self_attn.v_proj"), width)
    groups = len(queries) // len(keys)
    keys, values = (np.repeat(each, groups, axis=0) for each in (keys, values))
    scores = queries @ keys.swapaxes(1, 2) * width**-0.5
    scores = np.where(places <= places[:, None], scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    attended = (scores @ values).swapaxes(0, 1).reshape(len(x), -1)
    x = x + through(attended, "self_attn.o_proj")
    normed = norm(x, tensors["layers.0.post_attention_layernorm.weight"], eps)
    gate = through(normed, "mlp.gate_proj")
    inner = gate / (1 + np.exp(-gate)) * through(normed, "mlp.up_proj")
    return x + through(inner, "mlp.down_proj")


def drafted(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    target: tuple[Array, Array],
    seen: tuple[list[int], Array],
    count: int,
) -> tuple[list[int], Array]:
    """`count` tokens behind a text, and their logits. target: its embedding and its head. seen:
    the text, and what the target's head was given for all of its tokens but the newest."""
    embedding, head = target
    tokens, features = list(seen[0]), seen[1]
    rows = []
    for _ in range(count):
        # Each state stands beside the token after it.
        both = np.concatenate([embedding[tokens[1:]], features], axis=-1)
        states = layer(tensors, config, both @ tensors["fc.weight"].T + tensors.get("fc.bias", 0))
        rows.append(states[-1] @ head.T)
        tokens.append(int(rows[-1].argmax()))
        features = np.concatenate([features, states[-1:]])
    return tokens[-count:], np.stack(rows)
