"""T5Gemma 2 (Zhang et al., arXiv 2512.14856), without its eyes.

The layers are Gemma 3's. A layer of the decoder attends to its own positions and to the encoder's
output with one set of projections and one softmax, so that a cache holds both: the source's columns
first, then those of the text, which alone are rotated, by positions that count from the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints.t5_keys import MOST_LAYERS, whole_number
from ..errors import CheckpointError, PromptError
from ..interfaces.results import Reusable, Snapshot
from .encoder_decoder.context import EncoderDecoderContext, KeysValues, Network, Source
from .encoder_decoder.family import EncoderDecoderFamily
from .kv_cache import STEP, KVCache
from .rows import Place

SOURCE_ROWS = 512  # rows of a source that attend in one pass, which bounds their scores' memory
KINDS = ("sliding_attention", "full_attention")
GELU = "gelu_pytorch_tanh"
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Shape:
    """One stack's shapes and facts. windows, ropes: of each layer, the positions that it sees (None
    for all), and theta with the factor of positions. cap: of logits."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    epsilon: float
    windows: tuple[int | None, ...]
    ropes: tuple[tuple[float, float], ...]
    longest: int
    cap: float | None

    @classmethod
    def of(cls, config: Config) -> Shape:
        """Read the configuration of a stack. Raises CheckpointError."""
        layers = whole_number(config, "num_hidden_layers")
        kinds, heads = _kinds(config, layers), whole_number(config, "num_attention_heads")
        kv_heads = whole_number(config, "num_key_value_heads", heads)
        window, ropes = whole_number(config, "sliding_window", 4096), _ropes(config)
        refused = {
            "layer_types that its layers cannot be": len(kinds) != layers or {*kinds} - {*KINDS},
            "heads that cannot share their keys": heads % kv_heads,
            "attn_logit_softcapping, which caps attention": config.get("attn_logit_softcapping"),
            "an activation that no T5Gemma 2 has": config.get("hidden_activation", GELU) != GELU,
        }
        if what := next((name for name, is_so in refused.items() if is_so), ""):
            raise CheckpointError(f"config.json has {what}")
        return cls(
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=whole_number(config, "hidden_size"),
            intermediate_size=whole_number(config, "intermediate_size"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=whole_number(config, "head_dim", 256),
            scale=whole_number(config, "query_pre_attn_scalar", 256) ** -0.5,
            epsilon=_number(config, "rms_norm_eps", 1e-6),
            windows=tuple(window if kind == KINDS[0] else None for kind in kinds),
            ropes=tuple(ropes[kind] for kind in kinds),
            longest=whole_number(config, "max_position_embeddings", 131072),
            cap=_number(config, "final_logit_softcapping", 0.0) or None,
        )


def _number(config: Config, name: str, default: float) -> float:
    value = config.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise CheckpointError(f"config.json has {name} {value!a:.40}: need a number")
    return float(value)


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Of each layer; in files without layer_types every sixth is full, mostly."""
    if layers > MOST_LAYERS:
        raise CheckpointError(f"config.json asks for {layers} layers: no T5Gemma 2 has them")
    every = whole_number(config, "sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    usual = [KINDS[number % every == 0] for number in range(1, layers + 1)]
    return config.get("layer_types") or usual


def _ropes(config: Config) -> dict[str, tuple[float, float]]:
    """How each kind of layer rotates, as new files say it, or old ones."""
    older = dict(zip(KINDS, (("rope_local_base_freq", 1e4), ("rope_theta", 1e6)), strict=True))
    said = config.get("rope_parameters") or {KINDS[1]: config.get("rope_scaling")}
    ropes = {}
    for kind, (name, base) in older.items():
        part = said.get(kind) or {}
        how = part.get("rope_type") or part.get("type") or "default"
        if how not in ("default", "linear"):
            raise CheckpointError(f"config.json has rope_type {how!a:.40}: T5Gemma 2 has linear")
        factor = _number(part, "factor", 1.0) if how == "linear" else 1.0
        ropes[kind] = _number(part, "rope_theta", _number(config, name, base)), 1 / (factor or 1.0)
    return ropes


class RMSNorm(nn.Module):
    """Gemma's, which multiplies by 1 + weight."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = mx.zeros((width,))
        self._epsilon = epsilon

    def __call__(self, states: mx.array) -> mx.array:
        return mx.fast.rms_norm(states, 1.0 + self.weight, self._epsilon)


class Attention(nn.Module):
    """Grouped queries with normed, rotated queries and keys."""

    def __init__(self, shape: Shape, rope: tuple[float, float]) -> None:
        super().__init__()
        self._shape, self._rope = shape, rope
        width, inner, shared = shape.hidden_size, shape.heads, shape.kv_heads
        for name, heads in (("q_proj", inner), ("k_proj", shared), ("v_proj", shared)):
            self[name] = nn.Linear(width, heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(inner * shape.head_dim, width, bias=False)
        self.q_norm = RMSNorm(shape.head_dim, shape.epsilon)
        self.k_norm = RMSNorm(shape.head_dim, shape.epsilon)

    def queries(self, states: mx.array, offset: int | mx.array) -> mx.array:
        return self._rotated(self.q_norm(self._heads(self.q_proj(states))), offset)

    def keys_values(
        self, states: mx.array, offset: int | mx.array | None
    ) -> tuple[mx.array, mx.array]:
        """(batch, kv_heads, n, head_dim) each. offset: position of the first row, (batch,) or one;
        None for the source's rows, which are not rotated."""
        keys = self.k_norm(self._heads(self.k_proj(states)))
        keys = keys if offset is None else self._rotated(keys, offset)
        return keys, self._heads(self.v_proj(states))

    def __call__(
        self, queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array | str | None
    ) -> mx.array:
        scale = self._shape.scale
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        batch, _, rows, _ = mixed.shape
        return self.o_proj(mixed.transpose(0, 2, 1, 3).reshape(batch, rows, -1))

    def _heads(self, flat: mx.array) -> mx.array:
        batch, rows, _ = flat.shape
        return flat.reshape(batch, rows, -1, self._shape.head_dim).transpose(0, 2, 1, 3)

    def _rotated(self, heads: mx.array, offset: int | mx.array) -> mx.array:
        width, (base, scale) = self._shape.head_dim, self._rope
        how: dict[str, Any] = {"base": base, "scale": scale, "offset": offset}
        return mx.fast.rope(heads, width, traditional=False, **how)


Attend = Callable[[int | None, Attention, mx.array], mx.array]
"""Of a layer's window, its self_attn and normed states (batch, n, width)."""


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, states: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(states)) * self.up_proj(states))


class Layer(nn.Module):
    """One layer of either stack. window: None for all positions."""

    def __init__(self, shape: Shape, number: int) -> None:
        super().__init__()
        self.window = shape.windows[number]
        self.self_attn = Attention(shape, shape.ropes[number])
        self.mlp = FeedForward(shape)
        for name in ("self_attn", "feedforward"):
            for place in ("pre", "post"):
                self[f"{place}_{name}_layernorm"] = RMSNorm(shape.hidden_size, shape.epsilon)

    def __call__(
        self, states: mx.array, attend: Callable[[Attention, mx.array], mx.array]
    ) -> mx.array:
        """attend: what self_attn makes of normed states, (batch, n, width)."""
        mixed = attend(self.self_attn, self.pre_self_attn_layernorm(states))
        states = states + self.post_self_attn_layernorm(mixed)
        inner = self.mlp(self.pre_feedforward_layernorm(states))
        return states + self.post_feedforward_layernorm(inner)


class Stack(nn.Module):
    """Encoder or decoder."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = [Layer(shape, number) for number in range(len(shape.windows))]
        self.norm = RMSNorm(shape.hidden_size, shape.epsilon)


class T5Gemma2(Network):
    """The whole model but for its vision tower. end_of_image: the token whose vector is
    `eoi_embedding`. image: a token that no text has."""

    model_type = "t5gemma2"

    def __init__(
        self, encoder: Shape, decoder: Shape, start: int, end_of_image: int, image: int
    ) -> None:
        super().__init__()
        self.vocabulary, self.width = decoder.vocab_size, decoder.hidden_size
        self.start, self.trained_length = (start,), encoder.longest
        self._shape, self._end_of_image, self._image = decoder, end_of_image, image
        self.model = nn.Module()
        self.model.encoder, self.model.decoder = Stack(encoder), Stack(decoder)
        self.model.encoder.embed_tokens = nn.Embedding(self.vocabulary, self.width)
        self.model.encoder.eoi_embedding = mx.zeros((self.width,))

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.model.decoder.layers)

    @property
    def dtype(self) -> mx.Dtype:  # type: ignore[override]
        return self.model.decoder.norm.weight.dtype

    def context(self, model: Any, read: Callable[[], Source], count: int) -> MergedContext:
        return MergedContext(model, read, count)

    def check_source(self, prompt: Sequence[int]) -> None:
        if self._image in prompt:
            raise PromptError("the prompt has the token of an image, and only text is read here")

    def embed(self, tokens: mx.array) -> mx.array:
        table, own = self.model.encoder.embed_tokens, self.model.encoder.eoi_embedding
        scaled = table(tokens) * mx.array(math.sqrt(self.width), dtype=self.dtype)
        return mx.where((tokens == self._end_of_image)[..., None], own, scaled)

    def head(self, states: mx.array) -> mx.array:
        logits, cap = self.model.encoder.embed_tokens.as_linear(states), self._shape.cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        states = self.embed(tokens)
        for layer in self.model.encoder.layers:
            states = layer(states, partial(_around, layer.window, mask))
        return self.model.encoder.norm(states)

    def project_encoded(self, encoded: mx.array) -> list[KeysValues]:
        attentions = (layer.self_attn for layer in self.layers)
        return [each.keys_values(encoded, None) for each in attentions]

    def decode(
        self,
        tokens: mx.array,
        caches: Sequence[KVCache],
        source: Source,
        place: Place,
        tables: Sequence[mx.array],
        outputs: list[mx.array] | None = None,
    ) -> mx.array:
        starts = [at - n for at, n in zip(place.starts, source.lengths, strict=True)]
        offset = starts[0] if len({*starts}) == 1 else mx.array(starts, dtype=mx.int32)
        whole: mx.array | str | None = None if place.rows == 1 else "causal"
        whole = whole if place.even else place.visible()
        sources, longest = mx.array(source.lengths)[:, None, None, None], max(starts) + place.rows

        def attend(cache: KVCache, window: int | None, own: Attention, rows: mx.array) -> mx.array:
            keys, values = cache.append(*own.keys_values(rows, offset))
            mask = whole
            if window is not None and window < longest:
                # The source is always in sight, and the window is one of the text.
                mask = place.visible(window) | (mx.arange(place.end) < sources)
            return own(own.queries(rows, offset), keys, values, mask)

        return self._decoded(tokens, [partial(attend, cache) for cache in caches], outputs)

    def teach(self, sources: mx.array, mask: mx.array, tokens: mx.array) -> mx.array:
        encoded, rows = self.encode(sources, mask), mx.arange(tokens.shape[1])
        seen = mx.broadcast_to(mask[:, None, None], (len(mask), 1, rows.size, mask.shape[1]))

        def attend(window: int | None, own: Attention, states: mx.array) -> mx.array:
            distances = rows[:, None] - rows
            near = (distances >= 0) & (distances < (window or rows.size))
            both = mx.concatenate([seen, mx.broadcast_to(near, (len(mask), 1, *near.shape))], -1)
            parts = zip(own.keys_values(encoded, None), own.keys_values(states, 0), strict=True)
            keys, values = (mx.concatenate([*each], axis=2) for each in parts)
            return own(own.queries(states, 0), keys, values, both)

        return self._decoded(tokens, [attend] * len(self.layers))

    def _decoded(
        self, tokens: mx.array, attends: Sequence[Attend], outputs: list[mx.array] | None = None
    ) -> mx.array:
        states = self.embed(tokens)
        for layer, attend in zip(self.layers, attends, strict=True):
            states = layer(states, partial(attend, layer.window))
            if outputs is not None:
                outputs.append(states)
        return self.model.decoder.norm(states)

    def source_nbytes(self, length: int) -> int:
        shape, rows = self._shape, min(length, SOURCE_ROWS)
        # The encoder's keys and values are projected, and copied behind one another.
        states = 6 * shape.hidden_size + 3 * shape.intermediate_size + 2 * self.row
        return length * (5 * shape.heads * rows + states) * self.dtype.size

    def cache_nbytes(self, source: int, columns: int) -> int:
        whole = -(-(source + columns) // STEP) * STEP
        return self.dtype.size * (source * self.width + whole * self.row)

    @property
    def row(self) -> int:
        return 2 * len(self.layers) * self._shape.kv_heads * self._shape.head_dim


def _around(
    window: int | None, mask: mx.array | None, attention: Attention, states: mx.array
) -> mx.array:
    """Attend in an encoder's layer: SOURCE_ROWS rows of (batch, n, width) at a time to what they
    see. A window reaches as far ahead as back, and one farther ahead if it is even. mask: (batch,
    n) bool, False for padding, whose rows see themselves, so that no softmax is over nothing."""
    length, mixed = states.shape[1], []
    queries, (keys, values) = attention.queries(states, 0), attention.keys_values(states, 0)
    back, ahead = (length, length) if window is None else ((window - 1) // 2, window // 2)
    for first in range(0, length, SOURCE_ROWS):
        last = min(first + SOURCE_ROWS, length)
        begin, end = max(0, first - back), min(length, last + ahead)
        distances = mx.arange(begin, end) - mx.arange(first, last)[:, None]
        seen = None if window is None else (distances >= -back) & (distances <= ahead)
        if mask is not None:
            real = mask[:, None, None, begin:end] | (distances == 0)
            seen = real if seen is None else real & seen
        part = queries[:, :, first:last], keys[:, :, begin:end], values[:, :, begin:end]
        mixed.append(attention(*part, seen))
        if length > SOURCE_ROWS:
            mx.eval(mixed[-1])  # or the scores of all rows would be in memory together
    return mx.concatenate(mixed, axis=1)


class MergedContext(EncoderDecoderContext):
    """A context whose caches begin with the source's columns."""

    @property
    def _source(self) -> Source:
        if self._given is None:
            read = self._read()
            rows = [read.arrays(row)[1:] for row in range(len(read.lengths))]
            for buffer, arrays in zip(self._buffers(), zip(*rows, strict=True), strict=True):
                buffer.hold(arrays)
            self._rows.ahead = read.lengths
            self._given = Source(read.encoded, ())
        return self._given

    def reusable(self, sequence: int) -> Reusable:
        source, rows = self._source, slice(sequence, sequence + 1)
        length = source.lengths[sequence]
        columns = (buffer.array[rows, :, :length] for buffer in self._buffers())
        arrays = (source.encoded[sequence], *columns)
        return Reusable(snapshot=Snapshot(length, None, arrays, exact=True))


_NAME = re.compile(
    r"(?:model\.)?(decoder\.(?:layers|norm)\b.*"
    r"|encoder\.(?:text_model\.)?(?:embed_tokens|eoi_embedding|layers|norm)\b.*)"
)


class T5Gemma2Family(EncoderDecoderFamily):
    copies: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("model.decoder.embed_tokens.weight", "lm_head.out_proj.weight"),
        "model.encoder.embed_tokens.weight",
    )

    def network(self, config: Config, tensors: Collection[str] | None) -> Network:
        encoder, decoder = _stacks(config)
        try:
            shapes = Shape.of(encoder), Shape.of(decoder)
        except (AttributeError, TypeError) as problem:
            raise CheckpointError("config.json has lists or objects where others are") from problem
        if len({(each.vocab_size, each.hidden_size) for each in shapes}) > 1:
            raise CheckpointError("config.json has stacks of different widths or vocabularies")
        layers = max(len(each.windows) for each in shapes)
        if tensors is not None and layers > len(tensors):
            raise CheckpointError(f"config.json asks for {layers} layers of {len(tensors)} tensors")
        start = whole_number(config, "decoder_start_token_id", decoder.get("bos_token_id", 2))
        if start >= shapes[1].vocab_size:
            raise CheckpointError(f"config.json has start token {start}, beyond its vocabulary")
        named = {"eoi": 256_000, "image": 256_001}
        images = (whole_number(config, f"{name}_token_index", id) for name, id in named.items())
        network = T5Gemma2(*shapes, start, *images)
        if isinstance(config.get("encoder"), Mapping) and "vision_config" in config["encoder"]:
            network.note = "the vision tower was left out: only text is read here"
        return network

    def names(self, config: Config, stored: Iterable[str]) -> dict[str, str]:
        """transformers saves other names than those of its modules: both are read."""
        found = {name: match[1] for name in stored if (match := _NAME.fullmatch(name))}
        return {
            "model." + name.replace("text_model.", "").replace("embed_tokens.eoi", "eoi"): place
            for place, name in found.items()
        }

    def unused(self, name: str) -> str:
        return "of the vision tower, and only text is read here"

    def written_config(self, config: Config, tensors: Collection[str]) -> dict[str, Any]:
        encoder = {k: v for k, v in config["encoder"].items() if k != "vision_config"}
        return {**config, "encoder": encoder}

    def with_layers(
        self, config: Config, chosen: Sequence[int], encoder: int | None = None
    ) -> dict[str, Any]:
        text, decoder = _stacks(config)
        depth = whole_number(text, "num_hidden_layers") if encoder is None else encoder
        whole = {**config["encoder"], "text_config": _cut(text, range(depth))}
        return {**config, "encoder": whole, "decoder": _cut(decoder, chosen)}


def _stacks(config: Config) -> tuple[Config, Config]:
    """The parts of config.json on the two stacks. Raises CheckpointError."""
    encoder, decoder = config.get("encoder"), config.get("decoder")
    text = encoder.get("text_config") if isinstance(encoder, Mapping) else None
    if not isinstance(text, Mapping) or not isinstance(decoder, Mapping):
        raise CheckpointError("config.json lacks encoder.text_config or decoder")
    return text, decoder


def _cut(stack: Config, chosen: Sequence[int]) -> dict[str, Any]:
    kinds = _kinds(stack, whole_number(stack, "num_hidden_layers"))
    layer_types = [kinds[number] for number in chosen]
    return {**stack, "num_hidden_layers": len(chosen), "layer_types": layer_types}


family = T5Gemma2Family()
