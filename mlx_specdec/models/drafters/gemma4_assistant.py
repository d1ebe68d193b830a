"""Gemma 4's assistants: drafters of a few layers that attend to the target's keys and values.
Source: google/gemma-4-*-it-assistant, as transformers reads them."""

import re
from collections.abc import Collection, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import FULL_ATTENTION, LM_HEAD, SLIDING_ATTENTION, Weights
from ...errors import CheckpointError
from ...types import FINAL
from ..base import Base
from ..foreign import spelled_old
from ..rows import KVCache, Place, Rows
from .files import ConfigEntries, DrafterFiles, StoredTensors, layer_sizes
from .network import Config, DrafterContext, DrafterNetwork, gathered

ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
EMBEDDING_WEIGHT = "embed_tokens.weight"
NEVER = ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp")
"""Features of Gemma 4's layers that an assistant's layers do not have."""
KEY_VALUE_TENSORS = re.compile(r"layers\.\d+\.self_attn\.[kv]_(proj|norm)\.weight")
"""Tensors that compute keys and values, which an assistant takes from the target."""


class TargetAttention:
    """The attention of the target's layer `number`, whose keys and values the assistant reads.
    `window` is None for full attention."""

    def __init__(self, number: int, attention: Any, window: int | None) -> None:
        self.hidden = (f"keys.{number}", f"values.{number}")
        self.heads, self.head_dim = attention.n_kv_heads, attention.head_dim
        self.width = self.heads * self.head_dim
        self._window = window
        self._rope = attention.rope

    def first(self, place: int) -> int:
        """Return the first position that a token at position `place` attends to."""
        return 0 if self._window is None else max(0, place + 1 - self._window)

    def keys(self, rows: mx.array, offset: int | mx.array) -> mx.array:
        """Return rotated keys, (batch, heads, m, head_dim), from rows, (batch, m, width), whose
        first is at position `offset`, one for all or (batch,) int32."""
        return self._rope(self.values(rows), offset=offset)

    def values(self, rows: mx.array) -> mx.array:
        """Return rows, (batch, m, width), divided into heads, (batch, heads, m, head_dim)."""
        return rows.reshape(*rows.shape[:2], self.heads, self.head_dim).swapaxes(1, 2)


class Assistant(DrafterNetwork):
    """The network of an assistant.

    Attributes:
        kinds: The kind of attention of each layer.
        head_dims: Width of a head, by kind of attention.
        window: Number of positions that sliding attention covers, including the token's own.
    """

    by_speculators = False

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        return config.get("model_type") in ASSISTANT_TYPES

    @staticmethod
    def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
        config = spelled_old(config)
        settings = ConfigEntries(directory / "config.json", config.get("text_config"), config)
        if feature := next((name for name in NEVER if settings.get(name)), None):
            raise settings.wrong(feature, "0 or false in an assistant")
        names = () if weights is None else weights.infos
        renamed = {"pre_projection.weight": "fc.weight"}
        if LM_HEAD not in names:  # the head is tied to the embedding, which has no other use here
            renamed[EMBEDDING_WEIGHT] = LM_HEAD

        def own_name(name: str) -> str:
            short = name.removeprefix("model.")
            return renamed.get(short, short)

        unused = filter(KEY_VALUE_TENSORS.fullmatch, map(own_name, names))
        return DrafterFiles(
            directory=directory,
            kind=kind,
            settings=settings,
            sizes=layer_sizes(settings, None),
            target_width=int(settings["backbone_hidden_size"]),
            vocabulary=int(settings["vocab_size"]),
            tensors=StoredTensors(directory, weights, own_name, (EMBEDDING_WEIGHT, *unused)),
        )

    def __init__(self, files: DrafterFiles) -> None:
        from mlx_lm.models.gemma4_text import DecoderLayer, ModelArgs

        super().__init__(files)
        sizes, settings = files.sizes, files.settings
        self.kinds = tuple(settings["layer_types"])
        dims = {
            SLIDING_ATTENTION: sizes.head_dim,
            FULL_ATTENTION: int(settings.get("global_head_dim", sizes.head_dim)),
        }
        self.head_dims = {kind: dims[kind] for kind in self.kinds}
        self.window = max(1, int(settings.get("sliding_window", 512)))
        given = {
            "head_dim": dims[SLIDING_ATTENTION],
            "global_head_dim": dims[FULL_ATTENTION],
            "num_key_value_heads": sizes.kv_heads,
            "num_kv_shared_layers": sizes.count,  # no layer computes keys and values
            "sliding_window": self.window,
            **dict.fromkeys(NEVER, 0),
        }
        args = ModelArgs.from_dict({**settings, **given})
        self.layers = [DecoderLayer(args, number) for number in range(sizes.count)]
        self.post_projection = nn.Linear(files.sizes.width, files.target_width, bias=False)
        # An embedding, because only the rows of the chosen tokens are multiplied.
        self.lm_head = nn.Embedding(files.vocabulary, files.sizes.width)
        if settings.get("use_ordered_embeddings"):
            clusters = int(settings.get("num_centroids", 2048))
            self._top_k = int(settings.get("centroid_intermediate_top_k", 32))
            self.masked_embedding = nn.Module()
            self.masked_embedding.centroids = nn.Linear(sizes.width, clusters, bias=False)
            self.masked_embedding.token_ordering = mx.arange(files.vocabulary)

    def bind(self, files: DrafterFiles, target: Base) -> None:
        super().bind(files, target)
        self.attentions = {kind: self._attention(kind, files, target) for kind in self.head_dims}
        attentions = self.attentions.values()
        self.hidden = (FINAL, *(name for attention in attentions for name in attention.hidden))
        self.widths = (target.width, *(a.width for a in attentions for _ in a.hidden))

    def _attention(self, kind: str, files: DrafterFiles, target: Base) -> TargetAttention:
        """Return the attention of the target's last layer of this kind that computes its own keys
        and values and fits the assistant's heads. Raises CheckpointError if there is none."""
        size, heads = self.head_dims[kind], files.sizes.heads
        for number, layer in reversed([*enumerate(getattr(target.network, "layers", ()))]):
            if getattr(layer, "layer_type", None) != kind or not layer.self_attn.has_kv:
                continue
            attention = layer.self_attn
            if attention.head_dim == size and heads % attention.n_kv_heads == 0:
                return TargetAttention(
                    number, attention, self.window if kind == SLIDING_ATTENTION else None
                )
        raise CheckpointError(
            f"{files.directory} is an assistant of Gemma 4, and the target has no {kind} for "
            f"{heads} heads of width {size}: the drafter belongs to another target"
        )

    def open(self, count: int = 1) -> DrafterContext:
        return AssistantContext(self, count)

    def caches(self, rows: Rows) -> list[Any]:
        return [KVCache(rows) for _ in self.attentions]

    def own_logits(self, states: mx.array) -> mx.array:
        """See `DrafterNetwork`; tokens outside of the likeliest clusters get -inf."""
        if "masked_embedding" not in self:
            return self.lm_head.as_linear(states)
        clusters = self.masked_embedding.centroids(states)
        best = mx.argpartition(-clusters, self._top_k - 1, axis=-1)[..., : self._top_k]
        members = self.masked_embedding.token_ordering.reshape(clusters.shape[-1], -1)
        tokens = members[best].flatten(2).astype(mx.int32)
        scores = (self.lm_head(tokens) @ states[..., None])[..., 0]
        shape = (*states.shape[:2], self._target.vocabulary)
        nothing = mx.full(shape, -mx.inf, dtype=scores.dtype)
        return mx.put_along_axis(nothing, tokens, scores, axis=-1)


class AssistantContext(DrafterContext):
    """The rows of a group in an assistant: the target's keys and values, and the target's states of
    the newest tokens. Draft tokens add nothing to the caches."""

    _network: Assistant

    def _process(self, hidden: mx.array, following: Sequence[Sequence[int]]) -> None:
        network = self._network
        self._advance(following)
        offset = self._rows.place.offset
        ends = list(accumulate(network.widths))
        self._final, *rows = mx.split(hidden.astype(network.dtype), ends[:-1], axis=-1)
        attentions = network.attentions.values()
        parts = zip(attentions, rows[::2], rows[1::2], self._caches, strict=True)
        for attention, keys, values, cache in parts:
            cache.append(attention.keys(keys, offset), attention.values(values))

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        self._process(hidden, following)
        newest = [range(len(tokens) - 1, len(tokens)) for tokens in following]
        self._fed_back = gathered(self._final, newest)
        self._place = Place(self.lengths, 1)
        # The target's keys and values, and a mask or None, by kind of attention.
        self._shared: dict[str, Any] = {}
        for (kind, attention), cache in zip(
            self._network.attentions.items(), self._caches, strict=True
        ):
            firsts = list(map(attention.first, self.lengths))
            begin, mask = min(firsts), None
            if not self._place.even:
                columns = mx.arange(begin, max(self.lengths))
                mask = columns < mx.array(self.lengths)[:, None]
                mask = (mask & (columns >= mx.array(firsts)[:, None]))[:, None, None]
            self._shared[kind] = (*cache.positions(begin), mask)
        return self.next_logits(mx.array([tokens[-1:] for tokens in following]))

    def next_logits(self, tokens: mx.array) -> mx.array:
        network = self._network
        states = network.fc(mx.concatenate([network.embed(tokens), self._fed_back], axis=-1))
        for layer, kind in zip(network.layers, network.kinds, strict=True):
            *pair, mask = self._shared[kind]
            states, *_ = layer(states, mask, shared_kv=pair, offset=self._place.offset)
        states = network.norm(states)
        self._fed_back = network.post_projection(states)
        return network.own_logits(states)
