"""A P-EAGLE with the tensors of Amazon's for gpt-oss, at tiny sizes, drafts what a plain version in
NumPy drafts. The source of names and of the forward pass is a P-EAGLE in PyTorch for AWS Neuron."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import Options, generate, load

from ..models.dflash_by_hand import Array, norm, softmax
from ..support import speculators, tiny
from ..support.speculators import HEAD_DIM, HEADS, KV_HEADS, LLAMA, VOCABULARY, WIDTH
from .support import hidden_states, numbered

LAYERS, EPS, MASK_TOKEN = 4, 1e-5, 5
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "yarn": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 2.0,
        "beta_slow": 0.5,
        "original_max_position_embeddings": 32,
        "truncate": False,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def written(directory: Path, rope: str, layers: list[int]) -> dict[str, Array]:
    """Write a drafter that reads the inputs of the target's `layers`. Return its tensors in
    float64."""
    shapes = {
        "fc.weight": (WIDTH, 3 * WIDTH),
        "norm.weight": (WIDTH,),
        "mask_hidden": (1, 1, 3 * WIDTH),
        "embed_tokens.weight": (VOCABULARY, WIDTH),
        "lm_head.weight": (VOCABULARY, WIDTH),
        "midlayer.hidden_norm.weight": (WIDTH,),
        **speculators.layer("midlayer", 2 * WIDTH),
    }
    for number in range(1, LAYERS):
        shapes |= speculators.layer(f"layers.{number}", WIDTH)
    tensors = speculators.random(shapes)
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": LAYERS,
        "draft_vocab_size": VOCABULARY,
        "ptd_token_id": MASK_TOKEN,
        "parallel_drafting": True,
        "rope_theta": 10000.0,
        "rope_scaling": ROPES[rope],
        "eagle_aux_hidden_state_layer_ids": layers,
    }
    counts = {"d2t": mx.zeros((VOCABULARY,), dtype=mx.int64), "t2d": mx.ones((VOCABULARY,)) > 0}
    speculators.write(directory, config, {**tensors, **counts})
    return {name: np.array(array).astype(np.float64) for name, array in tensors.items()}


def speeds_of(rope: str) -> tuple[Array, float]:
    """Return the speeds of rotation, and the factor of rotated heads."""
    pairs = HEAD_DIM // 2
    speeds = 10000.0 ** (-np.arange(pairs) / pairs)
    turns = 32 * speeds / (2 * math.pi)
    if rope == "yarn":
        low, high = (
            pairs * math.log(32 / (beta * 2 * math.pi)) / math.log(10000.0) for beta in (2.0, 0.5)
        )
        slowed = np.clip(
            (np.arange(pairs) - max(low, 0)) / (min(high, HEAD_DIM - 1) - max(low, 0)), 0, 1
        )
        return speeds * (1 - slowed) + speeds / 8.0 * slowed, 0.1 * math.log(8.0) + 1
    if rope == "llama3":
        fast = np.clip((turns - 1.0) / (4.0 - 1.0), 0, 1)
        return speeds * fast + speeds / 8.0 * (1 - fast), 1.0
    return speeds, 1.0


def attention(layer: Mapping[str, Array], inputs: Array, rope: str) -> Array:
    rows = len(inputs)
    speeds, factor = speeds_of(rope)
    angles = np.arange(rows)[:, None] * speeds

    def heads(name: str, rotated: bool) -> Array:
        flat = inputs @ layer[f"self_attn.{name}_proj.weight"].T
        states = flat.reshape(rows, -1, HEAD_DIM).swapaxes(0, 1)
        if rotated:
            first, second = np.split(factor * states, 2, axis=-1)
            turned = first * np.cos(angles) - second * np.sin(angles)
            states = np.concatenate(
                [turned, second * np.cos(angles) + first * np.sin(angles)], axis=-1
            )
        return states if name == "q" else np.repeat(states, HEADS // KV_HEADS, axis=0)

    scores = heads("q", True) @ heads("k", True).swapaxes(1, 2) * HEAD_DIM**-0.5
    scores = np.where(np.tril(np.ones((rows, rows), dtype=bool)), scores, -np.inf)
    mixed = (softmax(scores) @ heads("v", False)).swapaxes(0, 1).reshape(rows, -1)
    return mixed @ layer["self_attn.o_proj.weight"].T


def expected(tensors: Mapping[str, Array], hidden: Array, following: list[int], rope: str) -> Array:
    """Return the logits of the token after `following`, and of three tokens after it."""
    tokens = [*following, *[MASK_TOKEN] * 3]
    masked = np.repeat(tensors["mask_hidden"].reshape(1, -1), 3, axis=0)
    states = np.concatenate([hidden, masked]) @ tensors["fc.weight"].T
    embedded = tensors["embed_tokens.weight"][tokens]
    for number in range(LAYERS):
        path = f"layers.{number}." if number else "midlayer."
        layer = {name.removeprefix(path): tensors[name] for name in tensors if path in name}
        inputs = norm(states, layer["input_layernorm.weight"], EPS)
        if number == 0:
            embedded = norm(embedded, layer["input_layernorm.weight"], EPS)
            normed = norm(states, layer["hidden_norm.weight"], EPS)
            inputs = np.concatenate([embedded, normed], axis=-1)
        states = states + attention(layer, inputs, rope)
        inner = norm(states, layer["post_attention_layernorm.weight"], EPS)
        gate, up = (inner @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        states = states + gate / (1 + np.exp(-gate)) * up @ layer["mlp.down_proj.weight"].T
    states = norm(states, tensors["norm.weight"], EPS)
    return states[len(following) - 1 :] @ tensors["lm_head.weight"].T


@pytest.mark.parametrize("rope", [*ROPES])
def test_the_drafts_of_a_published_peagle(rope: str, tmp_path: Path) -> None:
    """It reads the inputs of layers, and has an embedding and a head of its own."""
    tensors = written(tmp_path / "drafter", rope, [1, 2, 2])
    target = tiny.write("llama", tmp_path / "target", eos_token_id=None)
    pair, network = load(numbered(target, VOCABULARY), tmp_path / "drafter"), tiny.build("llama")
    tokens = [2 + 7 * index * index % 60 for index in range(40)]
    how = Options(max_tokens=5, num_draft=4, delta=1.0, cost_cache=False)
    for length in (4, 5, 9, 36):
        states, _ = hidden_states(network, tokens[: length - 1])
        # Its layer ids count the inputs of layers.
        hidden = np.concatenate([states[0], states[1], states[1]], axis=-1)
        rows = expected(tensors, hidden, tokens[1:length], rope)
        drafted = generate(pair, tokens[:length], how).tokens[:4]
        assert list(drafted) == rows.argmax(axis=-1).tolist()


def test_the_text_is_that_of_plain_decoding(tmp_path: Path) -> None:
    written(tmp_path / "drafter", "yarn", [1, 2, 2])
    target = numbered(tiny.write("gpt_oss", tmp_path / "target"), VOCABULARY)
    pair, prompt = load(target, tmp_path / "drafter"), [5, 9, 12, 7, 33, 21, 8]
    options = {"max_tokens": 16, "temperature": 1.0, "seed": 3}
    plain = generate(pair, prompt, Options(**options, regular=True))
    result = generate(pair, prompt, Options(**options, num_draft=4))
    assert result.tokens == plain.tokens and result.stats.drafted > result.stats.accepted
    assert result.labels.proposer == "peagle"
