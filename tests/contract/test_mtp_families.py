"""Layers for multi-token prediction of several families and depths, under the names of their
authors, draft what a plain pass in NumPy over the complete sequence drafts."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_specdec import Options, Request, generate, generate_many, load, stream_generate

from ..support import tiny
from ..support.families import config_of
from .support import numbered, quick

SIZE, WIDTH, INNER, HEADS, KV, DIM, THETA, EPS = 400, 32, 48, 4, 2, 8, 10000.0, 1e-5
LAYERS = 2
Arrays = dict[str, np.ndarray]
RANDOM = np.random.default_rng(5)


def matrix(*shape: int) -> np.ndarray:
    return (RANDOM.standard_normal(shape) * 1.5 * shape[-1] ** -0.5).astype(np.float32)


def scale() -> np.ndarray:
    return (1 + 0.3 * RANDOM.standard_normal(WIDTH)).astype(np.float32)


def attention(prefix: str, *, bias: bool = False) -> Arrays:
    rows = {"q_proj": HEADS * DIM, "k_proj": KV * DIM, "v_proj": KV * DIM}
    made = {f"{prefix}{name}.weight": matrix(count, WIDTH) for name, count in rows.items()}
    made[f"{prefix}o_proj.weight"] = matrix(WIDTH, HEADS * DIM)
    if bias:
        made |= {f"{prefix}{name}.bias": matrix(1, count)[0] for name, count in rows.items()}
    return made


def gated(prefix: str) -> Arrays:
    shapes = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    return {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}


def rms(rows: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return rows / np.sqrt((rows**2).mean(-1, keepdims=True) + EPS) * weight


def sigmoid(rows: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-rows))


def rotated(heads: np.ndarray, pairs: str) -> np.ndarray:
    """Rotate (rows, heads, dim). pairs: "halves", "neighbors" or "" for no rotation."""
    if not pairs:
        return heads
    angles = np.arange(len(heads))[:, None] * THETA ** (-2 * np.arange(DIM // 2) / DIM)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    if pairs == "halves":
        first, second = heads[..., : DIM // 2], heads[..., DIM // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
    out = np.empty_like(heads)
    out[..., ::2] = heads[..., ::2] * cos - heads[..., 1::2] * sin
    out[..., 1::2] = heads[..., 1::2] * cos + heads[..., ::2] * sin
    return out


def attend(weights: Arrays, prefix: str, rows: np.ndarray, pairs: str, window: int) -> np.ndarray:
    """Causal attention over all rows."""

    def heads(name: str, count: int) -> np.ndarray:
        bias = weights.get(f"{prefix}{name}.bias", 0)
        states = (rows @ weights[f"{prefix}{name}.weight"].T + bias).reshape(len(rows), count, DIM)
        norm = weights.get(f"{prefix}{name[0]}_norm.weight")
        return states if norm is None else rms(states, 1 + norm)

    queries, keys = (rotated(heads(f"{n}_proj", c), pairs) for n, c in (("q", HEADS), ("k", KV)))
    keys, values = (np.repeat(part, HEADS // KV, 1) for part in (keys, heads("v_proj", KV)))
    scores = np.einsum("rhd,shd->hrs", queries, keys) * DIM**-0.5
    at = np.arange(len(rows))
    seen = (at <= at[:, None]) & (at > at[:, None] - window)
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    mixed = np.einsum("hrs,shd->rhd", shares / shares.sum(-1, keepdims=True), values)
    if f"{prefix}g_proj.weight" in weights:
        mixed = mixed * sigmoid(rows @ weights[f"{prefix}g_proj.weight"].T)[..., None]
    return mixed.reshape(len(rows), -1) @ weights[f"{prefix}o_proj.weight"].T


def swiglu(weights: Arrays, prefix: str, rows: np.ndarray) -> np.ndarray:
    gate, up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    inner = rows @ gate.T
    return (inner * sigmoid(inner) * (rows @ up.T)) @ down.T


def squared(weights: Arrays, prefix: str, rows: np.ndarray) -> np.ndarray:
    up, down = (weights[f"{prefix}{name}_proj.weight"] for name in ("up", "down"))
    return np.maximum(rows @ up.T, 0) ** 2 @ down.T


@dataclass
class Case:
    """A family's layers: their tensors, and one step over all rows.

    Attributes:
        step: Returns the inputs of the head and of the next depth, from the depth, embeddings and
            hidden states.
        head: Returns the matrix of a depth's head, from the target's.
    """

    tensors: Arrays
    step: Callable[[int, np.ndarray, np.ndarray, Mapping[str, Any]], tuple[np.ndarray, np.ndarray]]
    capture: str = "final"
    depths: int = 1
    changes: dict[str, Any] = field(default_factory=dict)
    head: Callable[[int, np.ndarray], np.ndarray] = lambda depth, head: head


def llama_layer(
    weights: Arrays, prefix: str, rows: np.ndarray, pairs: str, plus: float = 0, window: int = 999
) -> np.ndarray:
    norms = [plus + weights[f"{prefix}{n}_layernorm.weight"] for n in ("input", "post_attention")]
    rows = rows + attend(weights, f"{prefix}self_attn.", rms(rows, norms[0]), pairs, window)
    return rows + swiglu(weights, f"{prefix}mlp.", rms(rows, norms[1]))


def llama_tensors(prefix: str, *, bias: bool = False) -> Arrays:
    names = ("input_layernorm", "post_attention_layernorm")
    norms = {f"{prefix}{name}.weight": scale() for name in names}
    return {**norms, **attention(f"{prefix}self_attn.", bias=bias), **gated(f"{prefix}mlp.")}


def mimo() -> Case:
    at = "model.mtp_layers.0."
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    weights = {**llama_tensors(at, bias=True), **{f"{at}{n}.weight": scale() for n in norms}}
    weights[f"{at}input_proj.weight"] = matrix(WIDTH, 2 * WIDTH)

    def step(depth: int, embedded: np.ndarray, hidden: np.ndarray, target: object) -> Any:
        token, state, final = (weights[f"{at}{name}.weight"] for name in norms)
        both = np.concatenate([rms(hidden, state), rms(embedded, token)], -1)
        rows = llama_layer(weights, at, both @ weights[f"{at}input_proj.weight"].T, "halves")
        return (rms(rows, final),) * 2

    return Case(weights, step, changes={"num_nextn_predict_layers": 1})


def ernie() -> Case:
    weights = llama_tensors("model.mtp_block.0.")
    weights |= {f"model.mtp_{name}_norm.0.weight": scale() for name in ("emb", "hidden")}
    weights["model.mtp_linear_proj.0.weight"] = matrix(WIDTH, 2 * WIDTH)

    def step(
        depth: int, embedded: np.ndarray, hidden: np.ndarray, target: Mapping[str, Any]
    ) -> Any:
        emb, state = (weights[f"model.mtp_{name}_norm.0.weight"] for name in ("emb", "hidden"))
        both = np.concatenate([rms(embedded, emb), rms(hidden, state)], -1)
        rows = both @ weights["model.mtp_linear_proj.0.weight"].T
        rows = llama_layer(weights, "model.mtp_block.0.", rows, "neighbors")
        return rms(rows, target["model.norm.weight"]), rows

    changes = {"num_nextn_predict_layers": 1, "head_dim": DIM}
    return Case(weights, step, f"after.{LAYERS - 1}", changes=changes)


def nemotron() -> Case:
    first, second = "mtp.layers.0.", "mtp.layers.1."
    names = (f"{first}enorm", f"{first}hnorm", f"{first}norm", f"{second}norm")
    weights = {f"{name}.weight": scale() for name in (*names, f"{second}final_layernorm")}
    weights[f"{first}eh_proj.weight"] = matrix(WIDTH, 2 * WIDTH)
    weights |= attention(f"{first}mixer.")
    weights[f"{second}mixer.gate.weight"] = matrix(4, WIDTH)
    weights[f"{second}mixer.gate.e_score_correction_bias"] = matrix(1, 4)[0]
    for expert in ("experts.0", "experts.1", "experts.2", "experts.3", "shared_experts"):
        weights[f"{second}mixer.{expert}.up_proj.weight"] = matrix(32, WIDTH)
        weights[f"{second}mixer.{expert}.down_proj.weight"] = matrix(WIDTH, 32)

    def routed(rows: np.ndarray) -> np.ndarray:
        scores = sigmoid(rows @ weights[f"{second}mixer.gate.weight"].T)
        best = np.argsort(-(scores + weights[f"{second}mixer.gate.e_score_correction_bias"]))[:, :2]
        out = squared(weights, f"{second}mixer.shared_experts.", rows)
        for row, chosen in enumerate(best):
            shares = scores[row, chosen] / scores[row, chosen].sum()
            for share, expert in zip(shares, chosen, strict=True):
                prefix = f"{second}mixer.experts.{expert}."
                out[row] += share * squared(weights, prefix, rows[row : row + 1])[0]
        return out

    def step(depth: int, embedded: np.ndarray, hidden: np.ndarray, target: object) -> Any:
        emb, state, before, between = (weights[f"{name}.weight"] for name in names)
        both = np.concatenate([rms(embedded, emb), rms(hidden, state)], -1)
        rows = both @ weights[f"{first}eh_proj.weight"].T
        rows = rows + attend(weights, f"{first}mixer.", rms(rows, before), "", 999)
        rows = rows + routed(rms(rows, between))
        return (rms(rows, weights[f"{second}final_layernorm.weight"]),) * 2

    return Case(weights, step, changes={"mtp_hybrid_override_pattern": "*E"})


def step35() -> Case:
    weights: Arrays = {}
    for number in range(LAYERS, LAYERS + 3):
        at = f"model.layers.{number}."
        made = llama_tensors(at)
        for name in ("enorm", "hnorm", "transformer.shared_head.norm"):
            made[f"{at}{name}.weight"] = scale()
        made = {name: array - 1 if "norm" in name else array for name, array in made.items()}
        made |= {f"{at}self_attn.{name}_norm.weight": matrix(1, DIM)[0] for name in "qk"}
        made[f"{at}self_attn.g_proj.weight"] = matrix(HEADS, WIDTH)
        made[f"{at}eh_proj.weight"] = matrix(WIDTH, 2 * WIDTH)
        made[f"{at}transformer.shared_head.output.weight"] = matrix(SIZE, WIDTH)
        weights |= made

    def step(depth: int, embedded: np.ndarray, hidden: np.ndarray, target: object) -> Any:
        at = f"model.layers.{LAYERS + depth}."
        emb, state, last = (
            1 + weights[f"{at}{name}.weight"]
            for name in ("enorm", "hnorm", "transformer.shared_head.norm")
        )
        both = np.concatenate([rms(embedded, emb), rms(hidden, state)], -1)
        rows = both @ weights[f"{at}eh_proj.weight"].T
        rows = llama_layer(weights, at, rows, "halves", plus=1, window=tiny.WINDOW)
        return rms(rows, last), rows

    def head(depth: int, head: np.ndarray) -> np.ndarray:
        return weights[f"model.layers.{LAYERS + depth}.transformer.shared_head.output.weight"]

    kinds = ["sliding_attention", "full_attention", *["sliding_attention"] * 3]
    changes = {"num_nextn_predict_layers": 3, "layer_types": kinds}
    return Case(weights, step, f"after.{LAYERS - 1}", 3, changes, head)


CASES = {"mimo": mimo, "ernie4_5_moe": ernie, "nemotron_h": nemotron, "step3p5": step35}


def written(family: str, case: Case, directory: Path) -> tuple[Path, Any]:
    """Write the target with its layers. Return its directory and mlx-lm's network."""
    config = {**config_of(family), **case.changes, "vocab_size": SIZE, "rms_norm_eps": EPS}
    network = tiny.from_config(config)
    weights = {name: np.array(array) for name, array in tree_flatten(network.parameters())}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    both = {name: mx.array(array) for name, array in {**weights, **case.tensors}.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), both, {"format": "pt"})
    return numbered(directory, SIZE), network


def expected(
    case: Case, target: Arrays, hidden: np.ndarray, tokens: list[int], count: int
) -> list[int]:
    """Return the greedy draft of `count` tokens. hidden: Of all tokens but the last."""
    embedding = next(array for name, array in target.items() if "embed" in name)
    known, drafted = len(hidden), list(tokens)
    outputs = hidden
    for place in range(count):
        depth = min(place, case.depths - 1)
        if place < case.depths:
            inputs, following = outputs, drafted[1 + place : 1 + place + known]
        else:  # the last layer reads its own output at the next positions
            inputs = np.concatenate([inputs, outputs[-1:]])
            following = drafted[1 + depth :]
        head_rows, outputs = case.step(depth, embedding[following], inputs, target)
        row = case.head(depth, target["lm_head.weight"]) @ head_rows[-1]
        drafted.append(int(row.argmax()))
    return drafted[len(tokens) :]


def hidden_of(network: Any, capture: str, tokens: list[int]) -> np.ndarray:
    """What layers for multi-token prediction read of mlx-lm's network."""
    inner = network.backbone if hasattr(network, "backbone") else network.model
    norm = inner.norm if capture != "final" else None
    if norm is not None:
        inner.norm = lambda rows: rows
    rows = np.array(inner(mx.array([tokens]))[0])
    if norm is not None:
        inner.norm = norm
    return rows


@pytest.mark.parametrize("family", quick(CASES, "nemotron_h", "step3p5"))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random layers are rarely right
def test_drafts_are_those_of_a_plain_pass_and_change_no_text(family: str, tmp_path: Path) -> None:
    case = CASES[family]()
    directory, network = written(family, case, tmp_path / family)
    own = {name: np.array(array) for name, array in tree_flatten(network.parameters())}
    pair, prompt = load(directory), np.random.default_rng(1).integers(2, SIZE, 9).tolist()
    # The rounds after the first one read what was accepted before them.
    lenient = Options(max_tokens=24, num_draft=5, proposer="mtp", delta=1.0, cost_cache=False)
    tokens, rounds = list(prompt), 0
    for step in stream_generate(pair, prompt, lenient):
        if step.accepted:
            hidden = hidden_of(network, case.capture, tokens[:-1])
            drafted = expected(case, own, hidden, tokens, step.accepted)
            assert list(step.tokens[: step.accepted]) == drafted
            rounds += 1
        tokens += step.tokens
    assert rounds == 4
    warm: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 3}
    options = Options(num_draft=4, proposer="mtp", **warm)
    rows = [prompt, prompt[:3]]
    plain = [generate(pair, row, Options(regular=True, **warm)).tokens for row in rows]
    results = generate_many(pair, [Request(row, options) for row in rows], options, batch_size=2)
    assert [one.tokens for one in results] == plain
    assert all(one.stats.drafted > one.stats.accepted for one in results)
