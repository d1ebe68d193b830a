"""An EAGLE-3 that attends to an encoder's output as well, in NumPy and float64.

Every token is drafted from the beginning; written from the paper, without this package's modules.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .dflash_by_hand import Array, by_head, encoder_attention, norm, softmax, turned

LAYER = "midlayer."


def rows(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    states: Array,
    embedded: Array,
    encoded: Array | None,
) -> Array:
    """What the layer puts out, (n, width), for states and the tokens after them."""
    layer = {name.removeprefix(LAYER): each for name, each in tensors.items() if LAYER in name}
    eps, width, theta = config["rms_norm_eps"], config["head_dim"], 10000.0
    both = np.concatenate(
        [
            norm(embedded, layer["input_layernorm.weight"], eps),
            norm(states, layer["hidden_norm.weight"], eps),
        ],
        axis=-1,
    )
    places = np.arange(len(states))
    queries, keys, values = (
        by_head(both @ layer[f"self_attn.{name}_proj.weight"].T, width) for name in "qkv"
    )
    queries, keys = (turned(each, places, theta, False) for each in (queries, keys))
    groups = len(queries) // len(keys)
    keys, values = (np.repeat(each, groups, axis=0) for each in (keys, values))
    scores = queries @ keys.swapaxes(1, 2) * width**-0.5
    scores = softmax(np.where(places <= places[:, None], scores, -np.inf))
    mixed = (scores @ values).swapaxes(0, 1).reshape(len(states), -1)
    states = states + mixed @ layer["self_attn.o_proj.weight"].T
    if encoded is not None:
        states = states + encoder_attention(tensors, LAYER, config, states, encoded)
    normed = norm(states, layer["post_attention_layernorm.weight"], eps)
    gate = normed @ layer["mlp.gate_proj.weight"].T
    inner = gate / (1 + np.exp(-gate)) * (normed @ layer["mlp.up_proj.weight"].T)
    return states + inner @ layer["mlp.down_proj.weight"].T


def chain(
    tensors: Mapping[str, Array],
    config: Mapping[str, Any],
    table: Array,
    tokens: Sequence[int],
    hidden: Array,
    encoded: Array | None,
    count: int,
) -> tuple[list[int], Array]:
    """`count` drafted tokens of the target's vocabulary, and (count, drafted) logits.

    table: the target's embedding. hidden: (len(tokens) - 1, states x width), of all but the newest.
    """
    states, following, logits = hidden @ tensors["fc.weight"].T, list(tokens[1:]), []
    for _ in range(count):
        out = rows(tensors, config, states, table[following], encoded)
        final = norm(out[-1], tensors["norm.weight"], config["rms_norm_eps"])
        logits.append(final @ tensors["lm_head.weight"].T)
        best = int(np.argmax(logits[-1]))
        following.append(best + int(tensors["d2t"][best]))
        states = np.concatenate([states, out[-1:]])
    return following[len(tokens) - 1 :], np.stack(logits)
