"""Block drafters as they are published draft what a plain version in NumPy drafts, and no text
changes."""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mlx_specdec import Options, generate, load

from ..models.dflash_by_hand import Array, norm, softmax
from ..support import speculators, tiny
from ..support.speculators import HEAD_DIM, HEADS, VOCABULARY, WIDTH
from .published_drafters import CASES, EPS, GROUP, LAYERS, SELECTOR, TOP_K, Case
from .support import hidden_states, numbered, quick


def turned(heads: Array, positions: Array, case: Case) -> Array:
    """Rotate (heads, rows, dim)."""
    rotated, width = case.rotated, HEAD_DIM
    pairs = rotated // 2
    count = width // 2 if case.proportional else pairs
    speeds = 10000.0 ** (-np.arange(pairs) / count)
    if case.yarn:
        ends = [
            pairs * math.log(16 / (turns * 2 * math.pi)) / math.log(10000.0) for turns in (4.0, 1.0)
        ]
        low, high = max(math.floor(ends[0]), 0), math.ceil(ends[1])
        slowed = np.clip((np.arange(pairs) - low) / max(high - low, 0.001), 0, 1)
        speeds = speeds * (1 - slowed) + speeds / 4.0 * slowed
        heads = heads * (0.1 * math.log(4.0) + 1)
    angles = positions[:, None] * speeds
    cos, sin = np.cos(angles), np.sin(angles)
    result = heads.copy()
    if case.interleaved:
        first, second = np.s_[..., 0:rotated:2], np.s_[..., 1:rotated:2]
    else:
        # Proportional rotation pairs an entry with the one half a head further.
        half = width // 2 if case.proportional else pairs
        first, second = np.s_[..., :pairs], np.s_[..., half : half + pairs]
    result[first] = heads[first] * cos - heads[second] * sin
    result[second] = heads[second] * cos + heads[first] * sin
    return result


def attention(layer: Mapping[str, Array], case: Case, context: Array, normed: Array) -> Array:
    rows, slots = len(context), len(normed)
    both = np.concatenate([context, normed])
    places = np.arange(rows + slots)

    def heads(name: str, states: Array) -> Array:
        flat = states @ layer[f"self_attn.{name}_proj.weight"].T
        return flat.reshape(len(states), -1, HEAD_DIM * (2 if name == "q" and case.gated else 1))

    queries, keys = heads("q", normed), heads("k", both)
    gate = None
    if case.gated:
        queries, gate = queries[..., :HEAD_DIM], queries[..., HEAD_DIM:]
    values = keys if case.gemma else heads("v", both)
    if case.gemma:
        values = norm(values, np.ones(HEAD_DIM), EPS)
    queries, keys = (
        norm(part, case.plus + layer[f"self_attn.{name}_norm.weight"], EPS).swapaxes(0, 1)
        for name, part in (("q", queries), ("k", keys))
    )
    queries = turned(queries, places[rows:], case)
    keys, values = turned(keys, places, case), values.swapaxes(0, 1)
    keys, values = (np.repeat(part, HEADS // case.kv_heads, axis=0) for part in (keys, values))
    scores = queries @ keys.swapaxes(1, 2) * (1.0 if case.gemma else HEAD_DIM**-0.5)
    behind = places[rows:, None] - places
    visible = behind < case.window
    if case.causal:
        visible &= behind >= 0
    scores = np.where(visible, scores, -np.inf)
    if case.sinks:
        sinks = layer["self_attn.attention_sink_bias"][:, None, None]
        scores = np.concatenate([scores, np.broadcast_to(sinks, (HEADS, slots, 1))], axis=-1)
        values = np.concatenate([values, np.zeros((HEADS, 1, HEAD_DIM))], axis=1)
    mixed = (softmax(scores) @ values).swapaxes(0, 1)
    if gate is not None:
        mixed = mixed / (1 + np.exp(-gate))
    return mixed.reshape(slots, -1) @ layer["self_attn.o_proj.weight"].T


def feed_forward(layer: Mapping[str, Array], case: Case, rows: Array) -> Array:
    gate, up = (rows @ layer[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    if case.gemma:
        inner = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    else:
        inner = gate / (1 + np.exp(-gate))
    return (inner * up) @ layer["mlp.down_proj.weight"].T


def convolved(
    layer: Mapping[str, Array], part: str, side: int, source: Array, rows: Array
) -> Array:
    """Add to each row the row before it, with factors that a DFlash 2 computes from `source`.
    side: 0 before the part of the layer, 1 after it."""
    factors = source @ layer[f"{part}_conv.kernel_projection.weight"].T
    factors = factors.reshape(len(rows), 2, 2, -1)[:, side].repeat(GROUP, axis=-1)
    factors = factors + layer[f"{part}_conv.base_kernel"][side]
    before = np.concatenate([np.zeros((1, WIDTH)), rows[:-1]])
    return factors[:, 0] * rows + factors[:, 1] * before


def expected(
    tensors: Mapping[str, Array],
    case: Case,
    hidden: Array,
    embedding: Array,
    head: Array,
    token: int,
) -> list[int]:
    """Return the draft of a block after `token`, whose hidden state is not known."""
    states = embedding[[token, *[3] * (case.slots - 1)]]
    if case.noise_level:
        times = np.where(np.arange(case.slots) == 0, 1000.0, 0.0)[:, None]
        angles = times * 10000.0 ** (-np.arange(64) / 64)
        waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
        first = waves @ tensors["log_snr_embed.fc1.weight"].T + tensors["log_snr_embed.fc1.bias"]
        first = first / (1 + np.exp(-first))
        states = states + first @ tensors["log_snr_embed.fc2.weight"].T
        states = states + tensors["log_snr_embed.fc2.bias"]
    normed = {name: case.plus + array for name, array in tensors.items() if "norm" in name}
    context = norm(hidden @ tensors["fc.weight"].T, normed["hidden_norm.weight"], EPS)
    for at in (f"layers.{number}." for number in range(LAYERS)):
        layer = {n.removeprefix(at): array for n, array in tensors.items() if n.startswith(at)}
        inputs = norm(states, normed[f"{at}input_layernorm.weight"], EPS)
        if case.second:
            attended = attention(
                layer, case, context, convolved(layer, "attention", 0, inputs, inputs)
            )
            states = states + convolved(layer, "attention", 1, inputs, attended)
            inputs = norm(states, normed[f"{at}post_attention_layernorm.weight"], EPS)
            inner = feed_forward(layer, case, convolved(layer, "mlp", 0, inputs, inputs))
            states = states + convolved(layer, "mlp", 1, inputs, inner)
            continue
        attended = attention(layer, case, context, inputs)
        if case.gemma:
            attended = norm(attended, layer["post_attention_layernorm.weight"], EPS)
            states = states + attended
            inner = norm(states, layer["pre_feedforward_layernorm.weight"], EPS)
            inner = feed_forward(layer, case, inner)
            inner = norm(inner, layer["post_feedforward_layernorm.weight"], EPS)
            states = (states + inner) * layer["layer_scalar"]
        else:
            states = states + attended
            inner = norm(states, normed[f"{at}post_attention_layernorm.weight"], EPS)
            states = states + feed_forward(layer, case, inner)
    states = norm(states, normed["norm.weight"], EPS)
    drafted: list[int] = []
    before = token
    for slot in range(case.first, case.slots):
        row = head @ states[slot]
        if case.markov:
            w1, w2 = (tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
            row = row + w2 @ w1[before]
        if case.second:
            selector = {name: tensors[f"candidate_selector.{name}"] for name in SELECTOR}
            gate = selector["hidden_projection.weight"] @ states[slot]
            likely = np.isin(np.arange(VOCABULARY), np.argsort(row)[-TOP_K:])
            row = row + selector["successor_codebook"] @ (
                selector["predecessor_codebook"][before] * gate
            )
            row = np.where(likely, row, -np.inf)
        before = int(row.argmax())
        drafted.append(before)
    return drafted


def written(case: Case, directory: Path) -> dict[str, Array]:
    """Write a drafter. Return its tensors in float64, by the names of DSpark's files."""
    tensors = speculators.random(case.shapes)
    stored = {}
    for name, array in tensors.items():
        if case.plus and "norm" in name:
            tensors[name] = array = array - case.plus
        for start, published in case.renamed.items():
            name = name.replace(start, published) if name.startswith(start) else name
        stored[name] = array
    speculators.write(directory, case.config, stored)
    return {name: np.array(array).astype(np.float64) for name, array in tensors.items()}


TOKENS = [5, 9, 12, 7, 33, 21, 8, 60, 2, 19, 33, 11]
QUICK = ("nvidia Nemotron-3.5-Lightning-30B-A3B DSpark", "incoai/Qwen3.8-27B-DFlash2")


@pytest.mark.parametrize("name", quick(CASES, *QUICK))
def test_drafts_of_a_published_block_drafter(name: str, tmp_path: Path) -> None:
    case, network = CASES[name], tiny.build("llama")
    tensors = written(case, tmp_path / "drafter")
    target = tiny.write("llama", tmp_path / "target", eos_token_id=None)
    pair = load(numbered(target, VOCABULARY), tmp_path / "drafter")
    embedding, head = (
        np.array(part.weight).astype(np.float64)
        for part in (network.model.embed_tokens, network.lm_head)
    )
    most = case.slots - case.first
    how = Options(max_tokens=most + 1, num_draft=most, delta=1.0, cost_cache=False)
    for length in (4, 5, 9, 12):
        states, _ = hidden_states(network, TOKENS[: length - 1])
        hidden = np.concatenate(states[:2], axis=-1)
        drafted = expected(tensors, case, hidden, embedding, head, TOKENS[length - 1])
        assert list(generate(pair, TOKENS[:length], how).tokens[:most]) == drafted
    settings = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    plain = generate(pair, TOKENS, Options(**settings, regular=True))
    result = generate(pair, TOKENS, Options(**settings, num_draft=5))
    assert result.tokens == plain.tokens and result.stats.drafted > result.stats.accepted
    kind = "dspark" if case.markov else "dflash2" if case.second else "dflash"
    assert result.labels.proposer == kind
