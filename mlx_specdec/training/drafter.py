"""A drafter on hidden states before its first step, and the directory that it ends with.

It begins as a directory like any other drafter's, so that what reads those reads this one. Layouts:
DSpark as the package `speculators` writes it, EAGLE-3 as its authors do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from ..checkpoints import destination, files
from ..checkpoints.source import as_directory, resolve
from ..engine.pair import Pair
from ..errors import OptionError
from ..interfaces import after
from ..models.base import Base
from ..models.drafters.config import ATTENDS, Settings, Shapes, layer_sizes
from ..models.drafters.dflash import CONFIDENCE, CONFIDENCE_BIAS
from ..models.drafters.kinds import attach, kind_named, read
from ..models.drafters.network import DrafterNetwork
from ..models.number_format import NumberFormat
from ..models.t5.context import EncoderDecoderModel
from .anchors import AnchorTask
from .collect import Rows
from .config import DataConfig, DrafterConfig
from .draft import STORED, round_as_stored, short_name, write_trained
from .drafter_tasks import DSparkTask, Eagle3Task
from .run import Trained, Training, Watcher, facts, work_directory

TAPS = 3
LAYERS_OF_TARGET = 4
"""For so many of the target's layers a drafter of blocks has one."""
MOST_LAYERS = 5
MOST_OWN_TOKENS = 32000
"""Of an EAGLE-3, whose head is its own and read once a token; so many the published ones have."""
MOST_RANK = 256
SHORT_TEXTS = 8192
"""Positions up to which rotary positions turn as fast as Llama's first ones."""
SEEN_ROWS = 4096
"""From which is told how large the target's hidden states are."""
SEEN_TOKENS = 1024
"""And its embeddings."""
QUIET = 0.3
"""How loud a new drafter is beside its target. As loud, it first has to unlearn that a token
follows itself, whose embedding its states begin with."""
SPECULATORS_VERSION = "0.9.0"


@dataclass(frozen=True)
class Texts:
    """What the texts tell of the drafter to be made.

    by_use: the target's tokens, the most frequent first. final: (width,), the size of each number
    that the head is given. features: the size of the hidden states that are read.
    """

    by_use: np.ndarray
    final: mx.array
    features: float

    @classmethod
    def of(cls, rows: Rows, width: int, vocabulary: int) -> Texts:
        """From the rows of a target's texts. width: of one hidden state."""
        tokens = rows.tokens()
        used = np.bincount(tokens, minlength=vocabulary)[:vocabulary]
        states = rows.states(np.arange(min(SEEN_ROWS, len(tokens)))).astype(mx.float32)
        squares = states.square()
        return cls(
            np.argsort(-used, kind="stable"),
            mx.sqrt(squares[:, -width:].mean(axis=0)),
            float(np.array(mx.sqrt(squares[:, :-width].mean()))),
        )


def tapped(layers: int) -> tuple[int, ...]:
    """The layers whose outputs are read: evenly from the second to the last but one."""
    first, last = min(1, layers - 1), max(0, layers - 2)
    first = min(first, last)
    every = (first + round(at * (last - first) / (TAPS - 1)) for at in range(TAPS))
    return tuple(dict.fromkeys(every))


@dataclass(frozen=True)
class Begun:
    """A drafter of random weights on its target. config: its config.json. fixed: what its files
    hold beside weights that are learned."""

    network: DrafterNetwork
    config: Mapping[str, Any]
    fixed: Mapping[str, mx.array]


def begin(directory: Path, pair: Pair, asked: DrafterConfig, texts: Texts) -> Begun:
    """A new drafter, which is written to `directory` and read from there."""
    target, fixed = pair.target, {}
    config = _config(pair, asked, texts)
    tensors = _weights(_shapes(asked.kind, directory, config), target, texts, asked.seed)
    if (drafted := config["draft_vocab_size"]) < target.vocabulary:
        ids = np.sort(texts.by_use[:drafted])
        tensors["lm_head.weight"] = tensors["lm_head.weight"][mx.array(ids)]
        fixed["d2t"] = mx.array(ids - np.arange(drafted), dtype=mx.int64)
        fixed["t2d"] = mx.array(np.isin(np.arange(target.vocabulary), ids))
    if asked.kind == "dspark":
        tensors[CONFIDENCE] = mx.zeros((1, target.width + config["markov_rank"]))
        tensors[CONFIDENCE_BIAS] = mx.zeros((1,))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), {**tensors, **fixed})
    stored = read(directory)
    assert stored is not None, "a directory of a known kind"
    return Begun(attach(stored, target, NumberFormat("float32")), config, fixed)


def write(directory: Path, begun: Begun, facts: Mapping[str, Any]) -> None:
    """All files of a drafter that was trained, as draft_files.write."""
    chains = begun.network.kind == "eagle3"
    tensors = dict(begun.fixed)
    for path, array in tree_flatten(begun.network.parameters()):
        name = re.sub(r"^layers\.0\.", "midlayer.", path) if chains else path
        tensors[name] = array.astype(STORED)
    write_trained(directory, tensors, {**begun.config, "dtype": "bfloat16"}, facts)


def _config(pair: Pair, asked: DrafterConfig, texts: Texts) -> dict[str, Any]:
    target = pair.target
    layers = tapped(target.layers)
    by_input = [layer + 1 for layer in layers]
    if asked.kind == "eagle3":
        return {
            # Its authors' layout has no word for what the target is.
            ATTENDS: False,
            **_layer_config(target, "llama", 1),
            "architectures": ["LlamaForCausalLMEagle3"],
            "bias": False,
            "draft_vocab_size": min(MOST_OWN_TOKENS, target.vocabulary),
            # Each program reads one of the two, which count differently.
            "eagle_aux_hidden_state_layer_ids": by_input,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        }
    by_depth = min(MOST_LAYERS, max(1, round(target.layers / LAYERS_OF_TARGET)))
    with as_directory(resolve(pair.name)) as directory:
        architectures = files.read_config(directory).get("architectures", [])
    return {
        "architectures": ["DSparkDraftModel"],
        "aux_hidden_state_layer_ids": by_input,
        "block_size": asked.num_draft,
        "confidence_head_with_markov": True,
        "draft_vocab_size": target.vocabulary,
        "enable_confidence_head": True,
        "markov_head_type": "rnn",
        "markov_rank": min(MOST_RANK, target.width // 2),
        "mask_token_id": int(texts.by_use[-1]),
        "sample_from_anchor": True,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": asked.num_draft}
            ],
            "verifier": {"architectures": architectures, "name_or_path": short_name(pair.name)},
        },
        "speculators_model_type": "dspark",
        "speculators_version": SPECULATORS_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_config(target, "qwen3", asked.layers or by_depth),
    }


def _layer_config(target: Base, model_type: str, count: int) -> dict[str, Any]:
    """Layers of the target's width, in proportions that are usual."""
    width = target.width
    head_dim = min(128 if width >= 2048 else 64, width + width % 2)
    heads = max(1, width // head_dim)
    positions = target.max_length or SHORT_TEXTS
    theta = 10000.0 if positions <= SHORT_TEXTS else 1000000.0
    encodes = isinstance(target, EncoderDecoderModel)
    encoder = {ATTENDS: True, "encoder_hidden_size": width} if encodes else {}
    return {
        **encoder,
        "attention_bias": False,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": -(-8 * width // 3 // 64) * 64,
        "max_position_embeddings": positions,
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": count,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocabulary,
    }


def _shapes(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """Every tensor that is learned, but for the confidence head, which starts at zero."""
    layer = config.get("transformer_layer_config", config)
    sizes = layer_sizes(Settings(directory / "config.json", layer), layer["model_type"])
    expected = kind_named(kind).expected
    assert expected is not None, "a kind that can be trained"
    shapes = expected(directory, config)
    shapes.pop("d2t", None)
    if kind == "eagle3":
        return shapes | {"lm_head.weight": (config["draft_vocab_size"], sizes.width)}
    # Qwen 3's layers norm queries and keys by head.
    _, optional = sizes.tensors(sizes.width)
    return shapes | {name: optional[name] for name in optional if name.endswith("_norm.weight")}


def _weights(shapes: Shapes, target: Base, texts: Texts, seed: int) -> dict[str, mx.array]:
    """Matrices of variance 1 / inputs, norms of 1, biases of 0; what parts of layers put out is as
    large as what it is added to. What the head is given is as the target's is, in proportion."""
    draws = mx.random.split(mx.random.key(seed), len(shapes))
    chains = "lm_head.weight" in shapes
    embedded = target.embed(mx.array(texts.by_use[None, :SEEN_TOKENS], dtype=mx.int32))
    size = texts.features if chains else mx.sqrt(embedded.square().mean())
    made = {}
    for (name, shape), draw in zip(sorted(shapes.items()), draws, strict=True):
        if name == "norm.weight":
            made[name] = QUIET * texts.final
        elif len(shape) == 1:
            made[name] = mx.zeros(shape) if name.endswith("bias") else mx.ones(shape)
        elif name == "lm_head.weight":
            # The columns of the target's output layer, whatever holds them.
            unit = mx.eye(target.width, dtype=target.state_dtype)[None]
            made[name] = target.head(unit)[0].astype(mx.float32).T
        elif name == "markov_head.markov_w2.weight":
            made[name] = mx.zeros(shape)
        else:
            spread = 1.0 if name == "markov_head.markov_w1.weight" else shape[-1] ** -0.5
            puts_out = name.endswith(("o_proj.weight", "down_proj.weight"))
            made[name] = spread * (size if puts_out else 1) * mx.random.normal(shape, key=draw)
    return made


TASKS: Mapping[str, Callable[..., AnchorTask]] = {"dspark": DSparkTask, "eagle3": Eagle3Task}


def train(
    pair: Pair,
    file: Path,
    output: Path,
    data: DataConfig,
    config: DrafterConfig,
    watcher: Watcher,
) -> Trained:
    """Train a drafter for `pair`'s target and write it as a directory that loads with it.

    pair: as `load` gives it, without a draft. The target's hidden states of all texts are
    kept on disk beside `output` until the end: they never change, and a pass of the target would
    take a third of every step. Raises PromptError for data with nothing usable, OptionError for a
    target that shows no hidden states, OutputError where `output` exists or cannot be written.
    """
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    with work_directory(output) as directory:
        target = pair.target
        taps = tuple(map(after, tapped(target.layers)))
        # A target that does not show or lend what is needed says so before any text is written.
        tokens = mx.zeros((1, 1), dtype=mx.int32)
        target.open([0]).advance(tokens, taps=taps)
        target.embed(tokens)
        training = Training(pair, file, directory, data, watcher, taps)
        texts = Texts.of(training.rows, target.width, pair.vocabulary)
        begun = begin(directory / "start", pair, config, texts)
        known = training.rows, training.prompts
        task = TASKS[config.kind](begun.network, target, *known, pair.vocabulary, config)
        start = task.evaluate()
        watcher.measured(0, start)
        origin = {"target": short_name(pair.name), "data_digest": training.digest}
        outcome = training.fit(task, config, start, origin)
        round_as_stored(task.module)
        outcome = replace(outcome, figures=task.evaluate())
        told = facts(origin, data, config, start, outcome)
        with destination.directory(output) as made:
            write(made, begun, told)
    return training.trained(output, task, outcome, start)
