"""Training of a hidden-state drafter, a DSpark. Random weights are written as a drafter's directory
in the layout of the package `speculators`, loaded like any other drafter, and trained. Source:
arXiv 2602.06036, section 4 (DFlash), arXiv 2607.05147 (DSpark)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoints import files
from ..checkpoints.source import as_directory, resolve
from ..engine.pair import Pair
from ..models.base import Base
from ..models.drafters.dflash import CONFIDENCE, CONFIDENCE_BIAS, DFlash
from ..models.drafters.files import ATTENDS, ConfigEntries, Shapes, layer_sizes
from ..models.drafters.kinds import attach, opened, read
from ..models.number_format import NumberFormat
from ..types import after
from .anchors import DSparkTask
from .collect import SampleFiles
from .config import DrafterConfig
from .draft import short_name, write_trained
from .fit import Training, Watcher, work_directory

HIDDEN_LAYERS = 3
"""Number of the target's layers whose hidden states a drafter reads, as in EAGLE-3."""
LAYERS_OF_TARGET = 4
"""Layers of the target for each layer of a DSpark."""
MOST_DSPARK_LAYERS = 5
"""Largest default number of a DSpark's layers."""
MOST_RANK = 256
"""Largest rank of a DSpark's Markov head."""
SHORT_TEXTS = 8192
"""Context length up to which the base of rotary positions is 10,000, as in Llama 1 and 2."""
SEEN_ROWS, SEEN_TOKENS = 4096, 1024
"""Number of hidden states, and of embeddings of the target, whose magnitude is measured."""
QUIET = 0.3
"""Magnitude of a new drafter's output relative to the target's. The output begins close to the
last token's embedding; a larger one must first unlearn to repeat this token."""
SPECULATORS_VERSION = "0.9.0"


def hidden_layers(layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs a drafter reads, evenly from the second to the last but one.
    layers: The number of the target's layers."""
    last = max(0, layers - 2)
    first = min(1, last)
    every = (
        first + round(at * (last - first) / (HIDDEN_LAYERS - 1)) for at in range(HIDDEN_LAYERS)
    )
    return tuple(dict.fromkeys(every))


def configuration(pair: Pair, config: DrafterConfig, mask_token: int) -> dict[str, Any]:
    """Return config.json of a new DSpark. Slots that are to be drafted hold `mask_token`."""
    target = pair.target
    by_depth = min(MOST_DSPARK_LAYERS, max(1, round(target.layers / LAYERS_OF_TARGET)))
    with as_directory(resolve(pair.name)) as directory:
        architectures = files.read_config(directory).get("architectures", [])
    method = {"proposal_type": "greedy", "speculative_tokens": config.num_draft}
    return {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in hidden_layers(target.layers)],
        "block_size": config.num_draft,
        "confidence_head_with_markov": True,
        "draft_vocab_size": target.vocabulary,
        "enable_confidence_head": True,
        "markov_head_type": "rnn",
        "markov_rank": min(MOST_RANK, target.width // 2),
        "mask_token_id": mask_token,
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": architectures, "name_or_path": short_name(pair.name)},
        },
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(target, config.layers or by_depth),
    }


def train(pair: Pair, file: Path, output: Path, config: DrafterConfig, watcher: Watcher) -> str:
    """Train a drafter for the target of `pair`, write it to the directory `output`, and return a
    report in one line.

    The target's hidden states of all sequences are stored next to `output` until the end, because
    computing them would take a third of every step.

    Raises:
        PromptError: If the data has too few usable texts.
        OptionError: If the target does not give out its hidden states or embeddings.
        OutputError: If `output` exists or cannot be written.
    """
    with work_directory(output) as directory:
        target = pair.target
        hidden = tuple(map(after, hidden_layers(target.layers)))
        # Raise early for a target that does not give out its hidden states or embeddings.
        tokens = mx.zeros((1, 1), dtype=mx.int32)
        target.open_batch([[0]]).advance(tokens, hidden=hidden)
        target.embed(tokens)
        training = Training(pair, file, directory, config, watcher, hidden)
        network, described = begin(directory / "start", pair, config, training.rows)
        task = DSparkTask(network, training, config)
        origin = {"target": short_name(pair.name), "data_digest": training.digest}
        finish = partial(write_trained, network=network, config=described)
        return training.improve(task, output, origin, finish)


def begin(
    directory: Path, pair: Pair, config: DrafterConfig, rows: SampleFiles
) -> tuple[DFlash, dict[str, Any]]:
    """Write a drafter with random weights to `directory`. Return it, attached to its target, and
    its config.json. The weights depend on statistics of the training data, `rows`."""
    target, size = pair.target, pair.vocabulary
    # The most frequent tokens of the training data come first.
    tokens = np.argsort(-np.bincount(rows.tokens(), minlength=size)[:size], kind="stable")
    described = configuration(pair, config, int(tokens[-1]))
    layer = described["transformer_layer_config"]
    sizes = layer_sizes(ConfigEntries(directory / "config.json", layer), layer["model_type"])
    # Qwen 3's norms of queries and keys are optional tensors.
    norms = {
        f"layers.{number}.self_attn.{part}_norm.weight": (sizes.head_dim,)
        for number in range(sizes.count)
        for part in "qk"
    }
    shapes = opened("dspark", directory, described, None)[1] | norms
    states = rows.states(np.arange(min(SEEN_ROWS, int(rows.lengths.sum())))).astype(mx.float32)
    final = mx.sqrt(states[:, -target.width :].square().mean(axis=0))
    embedded = target.embed(mx.array(tokens[None, :SEEN_TOKENS], dtype=mx.int32))
    tensors = _weights(shapes, embedded)
    tensors["norm.weight"] = QUIET * final
    tensors[CONFIDENCE] = mx.zeros((1, target.width + described["markov_rank"]))
    tensors[CONFIDENCE_BIAS] = mx.zeros((1,))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), tensors)
    stored = read(directory)
    assert stored is not None, "a directory of a known kind"
    network = attach(stored, target, NumberFormat("float32"))
    assert isinstance(network, DFlash), "a DSpark is a DFlash with two more heads"
    return network, described


def _layer_config(target: Base, count: int) -> dict[str, Any]:
    """Return the configuration of transformer layers of the target's width."""
    width = target.width
    head_dim = min(128 if width >= 2048 else 64, width + width % 2)
    heads = max(1, width // head_dim)
    positions = target.max_length or SHORT_TEXTS
    theta = 10000.0 if positions <= SHORT_TEXTS else 1000000.0
    encodes = target.kind == "encoder-decoder"
    encoder = {ATTENDS: True, "encoder_hidden_size": width} if encodes else {}
    return {
        **encoder,
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": -(-8 * width // 3 // 64) * 64,
        "max_position_embeddings": positions,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": count,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocabulary,
    }


def _weights(shapes: Shapes, embedded: mx.array) -> dict[str, mx.array]:
    """Draw matrices of variance 1 / inputs, norms of 1 and biases of 0. Output projections are
    scaled to the residual stream, whose size is the size of the target's embeddings, `embedded`."""
    draws = mx.random.split(mx.random.key(0), len(shapes))
    size = mx.sqrt(embedded.square().mean())
    made = {}
    for (name, shape), draw in zip(sorted(shapes.items()), draws, strict=True):
        if len(shape) == 1:
            made[name] = mx.zeros(shape) if name.endswith("bias") else mx.ones(shape)
        elif name == "markov_head.markov_w2.weight":
            made[name] = mx.zeros(shape)
        else:
            spread = 1.0 if name == "markov_head.markov_w1.weight" else shape[-1] ** -0.5
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            made[name] = spread * (size if is_output else 1) * mx.random.normal(shape, key=draw)
    return made
