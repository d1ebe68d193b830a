"""Gemma 4's assistants: a few layers that attend to the target's own keys and values.

Source: google/gemma-4-*-it-assistant, as transformers reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ...checkpoints.files import Weights
from ...errors import CheckpointError
from ...interfaces import FINAL, keys_of, values_of
from ..base import Base
from .config import LayerSizes, Settings, Shapes, layer_sizes
from .files import DrafterFiles, StoredTensors
from .network import Config, DrafterNetwork, Kind, Reading

if TYPE_CHECKING:
    from mlx_lm.models.gemma4_text import ModelArgs

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
class AssistantFiles(DrafterFiles):
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
        """See DrafterFiles."""
        if not str(config.get("model_type")).startswith("gemma4"):
            raise CheckpointError(
                f"{self.directory} is an assistant of Gemma 4, and this target is of type "
                f"{config.get('model_type')!a:.40}: the drafter belongs to another target"
            )
        super().check_config(config)


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return whether this is an assistant."""
    return config.get("model_type") in TYPES


def read(directory: Path, config: Config) -> AssistantFiles:
    """Open a directory. Raises CheckpointError."""
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
        kind="gemma4_assistant",
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


def expected(directory: Path, config: Config) -> Shapes:
    """Return the tensors that config.json asks for. Raises CheckpointError."""
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
    stated = settings.get("rope_parameters")
    its = stated.get(attention) if isinstance(stated, Mapping) else None
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


class Lender:
    """A layer of the target that lends its keys and values.

    number: of the layer. window: how many tokens it looks back, its own included; None without end.
    """

    def __init__(self, number: int, attention: Any, window: int | None) -> None:
        self.taps = (keys_of(number), values_of(number))
        self.heads, self.head_dim = attention.n_kv_heads, attention.head_dim
        self._window = window
        self._rope = attention.rope

    @property
    def width(self) -> int:
        """Of its keys, and of its values."""
        return int(self.heads * self.head_dim)

    def first(self, place: int) -> int:
        """The first token that one at `place` looks at."""
        return 0 if self._window is None else max(0, place + 1 - self._window)

    def keys(self, rows: mx.array, offset: int) -> mx.array:
        """(1, m, width), the first at position `offset` -> (1, heads, m, head_dim)."""
        turned: mx.array = self._rope(self.values(rows), offset=offset)
        return turned

    def values(self, rows: mx.array) -> mx.array:
        """(1, m, width) -> (1, heads, m, head_dim)."""
        return rows.reshape(*rows.shape[:2], self.heads, self.head_dim).swapaxes(1, 2)


class MaskedEmbedding(nn.Module):
    """Finds the tokens that are worth a look: those of the likeliest clusters."""

    def __init__(self, files: AssistantFiles, clusters: mx.array) -> None:
        super().__init__()
        self.centroids = nn.Linear(files.sizes.width, len(clusters), bias=False)
        self._clusters, self._top_k = clusters, files.top_k

    def tokens(self, states: mx.array) -> mx.array:
        """(1, m, width) -> (1, m, tokens) int32."""
        scores = self.centroids(states)
        best = mx.argpartition(-scores, self._top_k - 1, axis=-1)[..., : self._top_k]
        return self._clusters[best].flatten(2)


class Assistant(DrafterNetwork):
    """The network of a directory."""

    def __init__(self, files: AssistantFiles, target: Base) -> None:
        # Not at the top: T5s look for drafters too, and their path imports no mlx-lm.
        from mlx_lm.models.gemma4_text import DecoderLayer

        super().__init__(files, target)
        args = _args(files)
        self.layers = [DecoderLayer(args, number) for number in range(files.sizes.count)]
        self.post_projection = nn.Linear(files.sizes.width, files.target_width, bias=False)
        # Rows of it are looked up, of tokens that are worth it.
        self.lm_head = nn.Embedding(files.vocabulary, files.sizes.width)
        if files.clusters is not None:
            self.masked_embedding = MaskedEmbedding(files, files.clusters)
        self._attentions = files.attentions
        self._lenders = {each: _lender(each, files, target) for each in files.head_dims}
        self.taps = (FINAL, *(tap for each in self._lenders.values() for tap in each.taps))

    @property
    def lenders(self) -> dict[str, Lender]:
        """By the kind of attention."""
        return self._lenders

    def width_of(self, tap: str) -> int:
        """See DrafterNetwork."""
        lent = (each.width for each in self._lenders.values() if tap in each.taps)
        return next(lent, super().width_of(tap))

    def apart(self, hidden: mx.array) -> list[mx.array]:
        """What stands side by side, tap by tap."""
        ends = list(accumulate(map(self.width_of, self.taps)))
        return list(mx.split(hidden, ends[:-1], axis=-1))

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return AssistantReading(self)

    def step(
        self, token: mx.array, state: mx.array, lent: dict[str, Any], position: int
    ) -> tuple[mx.array, mx.array]:
        """(1, 1) int32, and the state before it, (1, 1, target's width), -> what the head is given,
        and the next state. lent: keys and values for each kind of attention."""
        states = self.fc(mx.concatenate([self.embed(token), state], axis=-1))
        for layer, attention in zip(self.layers, self._attentions, strict=True):
            states, *_ = layer(states, shared_kv=lent[attention], offset=position)
        states = self.norm(states)
        return states, self.post_projection(states)

    def own_logits(self, states: mx.array) -> mx.array:
        """See DrafterNetwork; tokens of clusters that are not looked at get -inf."""
        if "masked_embedding" not in self:
            logits: mx.array = self.lm_head.as_linear(states)
            return logits
        tokens = self.masked_embedding.tokens(states)
        scores = (self.lm_head(tokens) @ states[..., None])[..., 0]
        shape = (*states.shape[:2], self._target.vocabulary)
        nothing = mx.full(shape, -mx.inf, dtype=scores.dtype)
        return mx.put_along_axis(nothing, tokens, scores, axis=-1)


class AssistantReading(Reading):
    """One sequence: the target's keys and values, and the state of its newest token. What is
    guessed leaves nothing behind."""

    def __init__(self, network: Assistant) -> None:
        super().__init__(len(network.lenders))
        self._network = network
        self._newest: tuple[mx.array, mx.array] | None = None
        self._guessed: mx.array | None = None

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """See Reading."""
        network = self._network
        offset = self._rows.advance(following, 0).starts[0]
        final, *lent = network.apart(hidden.astype(network.dtype))
        lenders = zip(network.lenders.values(), lent[::2], lent[1::2], self._caches, strict=True)
        for lender, keys, values, cache in lenders:
            cache.append(lender.keys(keys, offset), lender.values(values))
        self._newest = following[:, -1:], final[:, -1:]

    def guess(self, count: int) -> mx.array:
        """See Reading."""
        assert self._newest is not None, "something was read"
        token, self._guessed = self._newest
        return self.guess_after(token)

    def guess_after(self, token: mx.array) -> mx.array:
        """See Reading."""
        assert self._guessed is not None, "a first token was guessed"
        network, place = self._network, self.length
        lenders = zip(network.lenders.items(), self._caches, strict=True)
        lent = {kind: cache.columns(lender.first(place)) for (kind, lender), cache in lenders}
        states, self._guessed = network.step(token, self._guessed, lent, place)
        return network.own_logits(states)


def _lender(attention: str, files: AssistantFiles, target: Base) -> Lender:
    """The last layer of the target with such keys and values of its own. Raises CheckpointError
    where there is none, or where its heads are of another size."""
    layers = enumerate(getattr(target.network, "layers", ()))
    own = [
        (number, layer.self_attn)
        for number, layer in layers
        if getattr(layer, "layer_type", None) == attention and layer.self_attn.has_kv
    ]
    if not own:
        raise CheckpointError(
            f"{files.directory} is an assistant of Gemma 4, and the target has no {attention} to "
            "lend it: the drafter belongs to another target"
        )
    number, theirs = own[-1]
    size = files.head_dims[attention]
    if theirs.head_dim != size or files.sizes.heads % theirs.n_kv_heads:
        raise CheckpointError(
            f"{files.directory} has {files.sizes.heads} heads of width {size} in its {attention}, "
            f"and the target {theirs.n_kv_heads} of width {theirs.head_dim}: the drafter belongs "
            "to another target"
        )
    return Lender(number, theirs, files.window if attention == SLIDING else None)


def _args(files: AssistantFiles) -> ModelArgs:
    """What mlx-lm's layers are made from: all of them have their keys and values from elsewhere."""
    from mlx_lm.models.gemma4_text import ModelArgs

    sizes = files.sizes
    return ModelArgs(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.count,
        intermediate_size=sizes.intermediate,
        num_attention_heads=sizes.heads,
        head_dim=files.head_dims.get(SLIDING, 1),
        global_head_dim=files.head_dims.get(FULL, 1),
        rms_norm_eps=sizes.eps,
        vocab_size=files.vocabulary,
        num_key_value_heads=sizes.kv_heads,
        num_kv_shared_layers=sizes.count,
        hidden_size_per_layer_input=0,
        rope_parameters={kind: dict(each) for kind, each in files.positions.items()},
        sliding_window=files.window,
        max_position_embeddings=sizes.max_positions,
        use_double_wide_mlp=False,
        layer_types=list(files.attentions),
    )


ASSISTANT = Kind("gemma4_assistant", recognizes, read, Assistant, expected, by_speculators=False)
