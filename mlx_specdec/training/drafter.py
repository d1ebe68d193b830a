"""Training of a hidden-state drafter. Random weights are written as a drafter's directory, loaded
like any other drafter, and trained. DSpark has the layout of the package `speculators`, EAGLE-3 the
layout of its authors. Source: arXiv 2602.06036, section 4 (DFlash), arXiv 2607.05147 (DSpark),
arXiv 2503.01840 (EAGLE-3)."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..checkpoints import files
from ..checkpoints.source import as_directory, resolve
from ..engine.pair import Pair
from ..interfaces import after
from ..models.base import Base
from ..models.drafters.dflash import CONFIDENCE, CONFIDENCE_BIAS, DFlash
from ..models.drafters.eagle import Eagle3
from ..models.drafters.files import ATTENDS, ConfigEntries, LayerSizes, Shapes, layer_sizes
from ..models.drafters.kinds import attach, describe, read
from ..models.drafters.layers import DrafterAttention
from ..models.drafters.network import DrafterNetwork
from ..models.number_format import NumberFormat
from .anchors import Anchored, AnchorTask, KeysValues, compared
from .anchors import attend as attend_at_anchors
from .collect import SampleFiles
from .config import DataConfig, DrafterConfig
from .draft import short_name, write_trained
from .fit import STORED, Trained, Training, Watcher, work_directory

TAPS = 3
"""Number of the target's layers whose hidden states a drafter reads, as in EAGLE-3."""
LAYERS_OF_TARGET = 4
"""Layers of the target for each layer of a DSpark."""
MOST_LAYERS = 5
"""Largest default number of a DSpark's layers."""
MOST_OWN_TOKENS, OWN_SHARE = 32000, 0.99
"""An EAGLE-3 drafts the most frequent tokens: as many as make up this share of the training data,
and at most as many as published ones. Its head is read for every draft token, so a larger one costs
time."""
OWN_STEP = 64
"""The number of these tokens is a multiple of this number, so that the head can be quantized."""
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
GAMMA = 4.0
"""Number of draft tokens over which the loss weight falls to 1 / e."""


@dataclass(frozen=True)
class TextStatistics:
    """Statistics of the training data from which a drafter is initialized.

    Attributes:
        by_use: The target's tokens, the most frequent first.
        common: How many of them make up OWN_SHARE of the data.
        final: The root mean square of each dimension of the head's input, (width,).
        features: The root mean square of the hidden states that the drafter reads.
    """

    by_use: np.ndarray
    common: int
    final: mx.array
    features: float

    @classmethod
    def of(cls, rows: SampleFiles, width: int, vocabulary: int) -> Self:
        """Measure the rows of the training data. width: The width of one hidden state."""
        tokens = rows.tokens()
        used = np.bincount(tokens, minlength=vocabulary)[:vocabulary]
        states = rows.states(np.arange(min(SEEN_ROWS, len(tokens)))).astype(mx.float32)
        squares = states.square()
        by_use = np.argsort(-used, kind="stable")
        return cls(
            by_use,
            int(np.searchsorted(used[by_use].cumsum(), OWN_SHARE * len(tokens))) + 1,
            mx.sqrt(squares[:, -width:].mean(axis=0)),
            float(np.array(mx.sqrt(squares[:, :-width].mean()))),
        )


def tapped(layers: int) -> tuple[int, ...]:
    """Return the layers whose outputs a drafter reads, evenly from the second to the last but one.
    layers: The number of the target's layers."""
    last = max(0, layers - 2)
    first = min(1, last)
    every = (first + round(at * (last - first) / (TAPS - 1)) for at in range(TAPS))
    return tuple(dict.fromkeys(every))


class DSparkTask(AnchorTask):
    """The training task of a DSpark, with its Markov head and its confidence head."""

    decay = math.exp(-1 / GAMMA)
    network: DFlash

    @classmethod
    def configuration(
        cls, pair: Pair, config: DrafterConfig, texts: TextStatistics
    ) -> dict[str, Any]:
        target = pair.target
        by_depth = min(MOST_LAYERS, max(1, round(target.layers / LAYERS_OF_TARGET)))
        with as_directory(resolve(pair.name)) as directory:
            architectures = files.read_config(directory).get("architectures", [])
        method = {"proposal_type": "greedy", "speculative_tokens": config.num_draft}
        return {
            "architectures": ["DSparkDraftModel"],
            "aux_hidden_state_layer_ids": [layer + 1 for layer in tapped(target.layers)],
            "block_size": config.num_draft,
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
                "proposal_methods": [method],
                "verifier": {"architectures": architectures, "name_or_path": short_name(pair.name)},
            },
            "speculators_model_type": "dspark",
            "speculators_version": SPECULATORS_VERSION,
            "tie_word_embeddings": False,
            "transformer_layer_config": _layer_config(target, "qwen3", config.layers or by_depth),
        }

    @classmethod
    def more_shapes(cls, config: Mapping[str, Any], sizes: LayerSizes) -> Shapes:
        """Return the shapes of optional tensors: Qwen 3's norms of queries and keys."""
        return {
            f"layers.{number}.self_attn.{part}_norm.weight": (sizes.head_dim,)
            for number in range(sizes.count)
            for part in "qk"
        }

    @classmethod
    def zeros(cls, config: Mapping[str, Any], target: Base) -> Shapes:
        return {CONFIDENCE: (1, target.width + config["markov_rank"]), CONFIDENCE_BIAS: (1,)}

    def loss(self, *batch: mx.array) -> mx.array:
        """Add the confidence head's loss: the head learns the acceptance probability."""
        anchored = Anchored(*batch)
        states, before = self._states(anchored)
        entropy, accepted = compared(self._logits(states, before), self._probabilities(anchored))
        tokens = anchored.chosen(anchored.tokens.reshape(anchored.tokens.shape[0], -1))
        embedded = self.network.markov_head.markov_w1(tokens)
        inputs = mx.stop_gradient(states), mx.stop_gradient(embedded)
        sure = self.network.confidence_head.logits(*inputs)
        return self._averaged(anchored, entropy) + nn.losses.binary_cross_entropy(sure, accepted)

    def draft(self, anchored: Anchored) -> mx.array:
        return self._logits(*self._states(anchored))

    def _logits(self, states: mx.array, before: mx.array) -> mx.array:
        network = self.network
        logits = network.own_logits(states[None])[0].astype(mx.float32)
        return (logits + network.markov_head.markov_w2(before))[:, : self._vocabulary]

    def _states(self, anchored: Anchored) -> tuple[mx.array, mx.array]:
        """Return the inputs of the output head, (n, width), and of `markov_w2`, (n, rank)."""
        states = self._blocks(anchored)
        blocks = states.reshape(-1, anchored.slots, states.shape[-1])
        tokens = anchored.tokens.reshape(-1, anchored.slots)
        latents, carried = [], None
        for slot in range(anchored.slots):
            at = tokens[:, slot : slot + 1], blocks[:, slot : slot + 1]
            latent, carried = self.network.markov_head.latent(*at, carried)
            latents.append(latent)
        before = mx.concatenate(latents, axis=1).reshape(*states.shape[:2], -1)
        return anchored.chosen(states), anchored.chosen(before)

    def _blocks(self, anchored: Anchored) -> mx.array:
        """Return the output of the final norm, (sequences, anchors x slots, width)."""
        network, slots = self.network, anchored.slots
        first = mx.arange(slots) == 0
        tokens = mx.where(first, anchored.tokens, network.mask_token)
        tokens = tokens.reshape(tokens.shape[0], -1)
        context = network.context(anchored.hidden)
        states = mx.stop_gradient(network.embed(tokens))
        for layer, source in zip(network.layers, self._sources(anchored), strict=True):
            attend = partial(_attend, layer.self_attn, context, anchored.anchors)
            states = network.through(layer, states, attend, source)
        normed: mx.array = network.norm(states)
        return normed


def _attend(
    attention: DrafterAttention, context: mx.array, anchors: mx.array, rows: mx.array
) -> mx.array:
    """Attend from the rows of all blocks, (sequences, anchors x slots, width)."""
    blocks = rows.reshape(anchors.size, -1, rows.shape[-1])
    offsets = anchors.reshape(-1)
    block = attention.keys_values(blocks, offsets)
    queries = attention.queries(blocks, offsets)
    return attend_at_anchors(attention, queries, attention.keys_values(context), block, anchors)


class Eagle3Task(AnchorTask):
    """The training task of an EAGLE-3. The first step runs on all rows, because later steps attend
    to them. Later steps run at the anchors only."""

    decay = 0.8
    network: Eagle3

    @classmethod
    def configuration(
        cls, pair: Pair, config: DrafterConfig, texts: TextStatistics
    ) -> dict[str, Any]:
        target, layers = pair.target, tapped(pair.target.layers)
        drafted = -(-texts.common // OWN_STEP) * OWN_STEP
        return {
            # The layout of EAGLE-3's authors has no key for the target's type.
            ATTENDS: False,
            **_layer_config(target, "llama", 1),
            "architectures": ["LlamaForCausalLMEagle3"],
            "bias": False,
            "draft_vocab_size": min(drafted, MOST_OWN_TOKENS, target.vocabulary),
            # Programs read one of the two keys. The first counts layers from 1, the second from 0.
            "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
        }

    @classmethod
    def more_shapes(cls, config: Mapping[str, Any], sizes: LayerSizes) -> Shapes:
        """Return the shape of an optional tensor: the drafter's own output head."""
        return {"lm_head.weight": (config["draft_vocab_size"], sizes.width)}

    @classmethod
    def file_name(cls, path: str) -> str:
        return re.sub(r"^layers\.0\.", "midlayer.", path)

    def draft(self, anchored: Anchored) -> mx.array:
        heads = mx.stack(self._heads(anchored), axis=2)
        states = anchored.chosen(heads.reshape(heads.shape[0], -1, heads.shape[-1]))
        logits = self.network.own_logits(states[None])[0].astype(mx.float32)
        return logits if self._ids is not None else logits[:, : self._vocabulary]

    def _heads(self, anchored: Anchored) -> list[mx.array]:
        """Return the inputs of the output head in each step, (sequences, anchors, width)."""
        network = self.network
        sources = self._sources(anchored)
        sequences: list[KeysValues] = []
        made: list[list[KeysValues]] = [[] for _ in network.layers]

        def attend_all(number: int, attention: DrafterAttention, rows: mx.array) -> mx.array:
            sequences.append(attention.keys_values(rows, 0))
            return attention.attend(attention.queries(rows, 0), *sequences[-1], "causal")

        def attend_drafts(number: int, attention: DrafterAttention, rows: mx.array) -> mx.array:
            # A draft begins at the row before its anchor.
            offsets = anchored.anchors.reshape(-1) + len(made[number])
            row = rows.reshape(offsets.size, 1, rows.shape[-1])
            made[number].append(attention.keys_values(row, offsets))
            keys, values = (
                mx.concatenate(list(parts), axis=2) for parts in zip(*made[number], strict=True)
            )
            queries = attention.queries(row, offsets)
            drafts = keys, values
            return attend_at_anchors(
                attention, queries, sequences[number], drafts, anchored.anchors
            )

        features = network.features(anchored.hidden)
        states = network.through(anchored.following, features, sources, attend_all)
        states = mx.take_along_axis(states, (anchored.anchors - 1)[..., None], axis=1)
        heads = [network.norm(states)]
        for step in range(1, anchored.slots):
            states = network.through(anchored.tokens[..., step], states, sources, attend_drafts)
            heads.append(network.norm(states))
        return heads


TASKS: Mapping[str, type[DSparkTask | Eagle3Task]] = {"dspark": DSparkTask, "eagle3": Eagle3Task}
"""Name of an architecture that can be trained -> its task."""


@dataclass(frozen=True)
class Begun:
    """A drafter with random weights, attached to its target, and its config.json. fixed: Tensors of
    the files that are not trained."""

    network: DrafterNetwork
    config: Mapping[str, Any]
    fixed: Mapping[str, mx.array]


def train(
    pair: Pair, file: Path, output: Path, data: DataConfig, config: DrafterConfig, watcher: Watcher
) -> Trained:
    """Train a drafter for the target of `pair` and write it to the directory `output`.

    The target's hidden states of all sequences are stored next to `output` until the end, because
    computing them would take a third of every step.

    Raises:
        PromptError: If the data has too few usable texts.
        OptionError: If the target does not give out its hidden states or embeddings.
        OutputError: If `output` exists or cannot be written.
    """
    with work_directory(output) as directory:
        target = pair.target
        taps = tuple(map(after, tapped(target.layers)))
        # Raise early for a target that does not give out its hidden states or embeddings.
        tokens = mx.zeros((1, 1), dtype=mx.int32)
        target.open([0]).advance(tokens, taps=taps)
        target.embed(tokens)
        training = Training(pair, file, directory, data, watcher, taps)
        texts = TextStatistics.of(training.rows, target.width, pair.vocabulary)
        begun = begin(directory / "start", pair, config, texts)
        task = TASKS[config.kind](begun.network, training, config)
        origin = {"target": short_name(pair.name), "data_digest": training.digest}
        return training.improve(task, output, origin, partial(write, begun=begun))


def begin(directory: Path, pair: Pair, config: DrafterConfig, texts: TextStatistics) -> Begun:
    """Write a drafter with random weights to `directory`, and load it."""
    target, task = pair.target, TASKS[config.kind]
    described = task.configuration(pair, config, texts)
    layer = described.get("transformer_layer_config", described)
    sizes = layer_sizes(ConfigEntries(directory / "config.json", layer), layer["model_type"])
    shapes = describe(config.kind, directory, described).tensors.shapes
    shapes |= task.more_shapes(described, sizes)
    tensors = _weights(shapes, target, texts, config.seed)
    tensors |= {name: mx.zeros(shape) for name, shape in task.zeros(described, target).items()}
    fixed = {}
    if (drafted := described["draft_vocab_size"]) < target.vocabulary:
        ids = np.sort(texts.by_use[:drafted])
        tensors["lm_head.weight"] = tensors["lm_head.weight"][mx.array(ids)]
        fixed["d2t"] = mx.array(ids - np.arange(drafted), dtype=mx.int64)
        fixed["t2d"] = mx.array(np.isin(np.arange(target.vocabulary), ids))
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(described), encoding="utf-8")
    mx.save_safetensors(str(directory / "model.safetensors"), {**tensors, **fixed})
    stored = read(directory)
    assert stored is not None, "a directory of a known kind"
    return Begun(attach(stored, target, NumberFormat("float32")), described, fixed)


def write(directory: Path, facts: Mapping[str, Any], begun: Begun) -> None:
    """Write all files of a trained drafter, with `facts` in provenance.json. Raises OSError."""
    task = TASKS[begun.network.kind]
    tensors = dict(begun.fixed)
    for path, array in tree_flatten(begun.network.parameters()):
        tensors[task.file_name(path)] = array.astype(STORED)
    write_trained(directory, tensors, {**begun.config, "dtype": "bfloat16"}, facts)


def _layer_config(target: Base, model_type: str, count: int) -> dict[str, Any]:
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
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_hidden_layers": count,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        "vocab_size": target.vocabulary,
    }


def _weights(shapes: Shapes, target: Base, texts: TextStatistics, seed: int) -> dict[str, mx.array]:
    """Draw matrices of variance 1 / inputs, norms of 1 and biases of 0. Output projections are
    scaled to the residual stream, and the final norm to QUIET times the target's."""
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
            # This gives the target's output matrix even if it is tied or quantized.
            unit = mx.eye(target.width, dtype=target.state_dtype)[None]
            made[name] = target.head(unit)[0].astype(mx.float32).T
        elif name == "markov_head.markov_w2.weight":
            made[name] = mx.zeros(shape)
        else:
            spread = 1.0 if name == "markov_head.markov_w1.weight" else shape[-1] ** -0.5
            is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
            made[name] = spread * (size if is_output else 1) * mx.random.normal(shape, key=draw)
    return made
