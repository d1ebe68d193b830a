"""Gemma 4's assistants: a few layers that attend to the target's own keys and values.

Source: google/gemma-4-*-it-assistant, as transformers reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import CheckpointError
from ..files import Weights
from .layout import SpeculatorFiles
from .settings import Settings
from .sizes import LayerSizes, Shapes, layer_sizes
from .stored import StoredTensors

TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
CENTROIDS = "masked_embedding.centroids.weight"
ORDERING = "masked_embedding.token_ordering"
FULL, SLIDING = "full_attention", "sliding_attention"
NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
NEVER = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
"""What layers of Gemma 4 may have, and those of its assistants have not."""
UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")
"""What makes keys and values, of which an assistant makes none."""
POSITIONS: Mapping[str, Mapping[str, Any]] = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
"""Where config.json says nothing of them."""


@dataclass(frozen=True)
class AssistantFiles(SpeculatorFiles):
    """attentions: the kind of each layer's. head_dims: of each kind. window: how many tokens a
    sliding one looks back, its own included. positions: of each kind, as mlx-lm takes them.
    clusters: (count, tokens of each) int32, the target's tokens, of which those of the `top_k`
    likeliest clusters are looked at; None where all tokens are.
    """

    sizes: LayerSizes
    attentions: tuple[str, ...]
    head_dims: Mapping[str, int]
    window: int
    positions: Mapping[str, Mapping[str, Any]]
    clusters: mx.array | None
    top_k: int

    def check_config(self, config: Mapping[str, Any]) -> None:
        """As SpeculatorFiles says."""
        if not str(config.get("model_type")).startswith("gemma4"):
            raise CheckpointError(
                f"{self.directory} is an assistant of Gemma 4, and this target is of type "
                f"{config.get('model_type')!a:.40}: the drafter belongs to another target"
            )
        super().check_config(config)


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is an assistant."""
    return config.get("model_type") in TYPES


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> AssistantFiles:
    """See `speculators.read`."""
    file = directory / "config.json"
    settings, outer = Settings(file, config.get("text_config")), Settings(file, config)
    sizes = layer_sizes(settings, None)
    stored = _stored(directory, sizes)
    stored.check_layers(sizes.count)
    attentions = _attentions(settings, sizes.count)
    vocabulary, target_width = settings.whole("vocab_size"), outer.whole("backbone_hidden_size")
    head_dims = _head_dims(stored, attentions)
    needed = _shapes(sizes, attentions, head_dims, vocabulary, target_width)
    count, top_k = _clusters(outer, vocabulary)
    if count:
        needed |= {CENTROIDS: (count, sizes.width), ORDERING: (vocabulary,)}
    stored.check(needed, {})
    ordering = stored.get(ORDERING)
    return AssistantFiles(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=(),
        taps=0,
        target_width=target_width,
        vocabulary=vocabulary,
        target_ids=None,
        tensors=stored.changed({}, without=[ORDERING]),
        attentions=attentions,
        head_dims=head_dims,
        window=settings.whole("sliding_window", 512),
        positions={each: _positions(settings, each) for each in head_dims},
        clusters=None if ordering is None else _ordered(directory, ordering).reshape(count, -1),
        top_k=top_k,
    )


def expected(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """The tensors of such a drafter, as far as config.json tells."""
    file = directory / "config.json"
    settings, outer = Settings(file, config.get("text_config")), Settings(file, config)
    sizes, vocabulary = layer_sizes(settings, None), settings.whole("vocab_size")
    if outer.flag("use_ordered_embeddings", False):
        raise CheckpointError(
            f"{directory} has no weights, and these alone tell which tokens belong together: give "
            "a directory that has them"
        )
    head_dims = {SLIDING: sizes.head_dim, FULL: settings.whole("global_head_dim", sizes.head_dim)}
    target_width = outer.whole("backbone_hidden_size")
    attentions = _attentions(settings, sizes.count)
    return _shapes(sizes, attentions, head_dims, vocabulary, target_width)


def _stored(directory: Path, sizes: LayerSizes) -> StoredTensors:
    """The head is tied to an embedding, which nothing else needs."""
    tied = HEAD not in Weights(directory).infos
    layers = range(min(sizes.count, len(Weights(directory).infos)))
    unused = (f"layers.{each}.self_attn.{part}.weight" for each in layers for part in UNUSED)
    return StoredTensors.of(directory, _naming(tied), (EMBEDDING, *unused))


def _naming(tied: bool) -> Callable[[str], str]:
    renamed = {"pre_projection.weight": "fc.weight"} | ({EMBEDDING: HEAD} if tied else {})

    def own_name(name: str) -> str:
        short = name.removeprefix("model.")
        return renamed.get(short, short)

    return own_name


def _attentions(settings: Settings, count: int) -> tuple[str, ...]:
    """The kind of each layer's. Raises CheckpointError, also for layers of another make."""
    if settings.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise settings.wrong("hidden_activation", "gelu_pytorch_tanh")
    if other := next((name for name in NEVER if settings.get(name)), None):
        raise settings.wrong(other, "0 or false in an assistant")
    kinds = settings.get("layer_types")
    known = isinstance(kinds, list) and all(kind in (FULL, SLIDING) for kind in kinds)
    if not known or len(kinds) != count:
        raise settings.wrong("layer_types", f"{FULL} or {SLIDING} for each of {count} layers")
    return tuple(kinds)


def _head_dims(stored: StoredTensors, attentions: tuple[str, ...]) -> dict[str, int]:
    """Of each kind, whatever config.json calls it."""
    dims: dict[str, int] = {}
    for number, attention in enumerate(attentions):
        shape = stored.shapes.get(f"layers.{number}.self_attn.q_norm.weight", ())
        dims.setdefault(attention, shape[0] if len(shape) == 1 else 1)
    return dims


def _shapes(
    sizes: LayerSizes,
    attentions: tuple[str, ...],
    head_dims: Mapping[str, int],
    vocabulary: int,
    target_width: int,
) -> Shapes:
    """What there has to be, clusters aside."""
    width, inner = sizes.width, sizes.intermediate
    shapes: Shapes = {
        "fc.weight": (width, 2 * target_width),
        "post_projection.weight": (target_width, width),
        "norm.weight": (width,),
        HEAD: (vocabulary, width),
    }
    for number, attention in enumerate(attentions):
        head_dim = head_dims[attention]
        own = {
            **{f"{norm}.weight": (width,) for norm in NORMS},
            "layer_scalar": (1,),
            "self_attn.q_proj.weight": (sizes.heads * head_dim, width),
            "self_attn.q_norm.weight": (head_dim,),
            "self_attn.o_proj.weight": (width, sizes.heads * head_dim),
            "mlp.gate_proj.weight": (inner, width),
            "mlp.up_proj.weight": (inner, width),
            "mlp.down_proj.weight": (width, inner),
        }
        shapes |= {f"layers.{number}.{name}": shape for name, shape in own.items()}
    return shapes


def _clusters(outer: Settings, vocabulary: int) -> tuple[int, int]:
    """How many clusters tokens are put into, and how many of these are looked at; 0 without."""
    if not outer.flag("use_ordered_embeddings", False):
        return 0, 0
    count = outer.whole("num_centroids", 2048)
    if vocabulary % count:
        raise outer.wrong("num_centroids", f"a divisor of the {vocabulary} tokens")
    return count, outer.whole("centroid_intermediate_top_k", 32, most=count)


def _ordered(directory: Path, ordering: mx.array) -> mx.array:
    """The tokens, cluster by cluster, int32."""
    ids = np.array(ordering).astype(np.int64)
    if not np.array_equal(np.sort(ids), np.arange(ids.size)):
        raise CheckpointError(
            f"{directory} has a {ORDERING} that does not name every token once: the drafter is "
            "damaged"
        )
    return mx.array(ids.astype(np.int32))


def _positions(settings: Settings, attention: str) -> dict[str, Any]:
    """Of one kind of attention, as mlx-lm takes them."""
    told = settings.get("rope_parameters")
    its = told.get(attention) if isinstance(told, Mapping) else None
    rope = Settings(settings.file, its, POSITIONS[attention])
    if (kind := rope.get("rope_type")) not in ("default", "proportional"):
        raise rope.wrong("rope_type", "default or proportional")
    rotated = rope.above_zero("partial_rotary_factor", 1.0)
    if rotated > 1:
        raise rope.wrong("partial_rotary_factor", "a share")
    theta, factor = rope.above_zero("rope_theta", 1e4), rope.above_zero("factor", 1.0)
    return {
        "rope_type": kind,
        "rope_theta": theta,
        "partial_rotary_factor": rotated,
        "factor": factor,
    }
