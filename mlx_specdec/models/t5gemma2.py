"""T5Gemma 2 (Zhang et al., arXiv 2512.14856), without the vision tower.

The layers are Gemma 3's. A decoder layer attends to the decoder's positions and to the encoder's
output with one set of projections and one softmax. A cache therefore holds both: the positions of
the source, and then the positions of the decoder. Only the latter are rotated, and count from 0."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoints.files import FULL_ATTENTION, SLIDING_ATTENTION, Weights, whole_number
from ..checkpoints.tensors import MOST_LAYERS
from ..errors import CheckpointError, PromptError
from ..system import open_files_kept
from .encoder_decoder.context import Caches, EncodedSources, Network, Tables
from .encoder_decoder.family import EncoderDecoderFamily
from .encoder_decoder.layers import Attend, Attention, Mask, attend_cached, attend_in_parts
from .rows import Place

with open_files_kept():
    from mlx_lm.models.gemma3_text import MLP, RMSNorm

Config = Mapping[str, Any]


class StackConfig:
    """The shapes of one stack. Raises CheckpointError.

    Attributes:
        windows: For each layer, the number of positions that it attends to; None for all.
        ropes: For each layer, theta and the factor by which positions are multiplied.
        cap: The value at which logits are softly capped; None without a cap.
    """

    def __init__(self, config: Config) -> None:
        layers = whole_number(config, "num_hidden_layers", most=MOST_LAYERS)
        kinds, ropes = _kinds(config, layers), _ropes(config)
        window = whole_number(config, "sliding_window", 4096)
        self.vocab_size = whole_number(config, "vocab_size")
        self.hidden_size = whole_number(config, "hidden_size")
        self.intermediate_size = whole_number(config, "intermediate_size")
        self.heads = whole_number(config, "num_attention_heads")
        self.kv_heads = whole_number(config, "num_key_value_heads", self.heads)
        self.head_dim = whole_number(config, "head_dim", 256)
        self.scale = whole_number(config, "query_pre_attn_scalar", 256) ** -0.5
        self.epsilon = float(config.get("rms_norm_eps") or 1e-6)
        self.windows = [window if kind == SLIDING_ATTENTION else None for kind in kinds]
        self.ropes = [ropes[kind] for kind in kinds]
        self.longest = whole_number(config, "max_position_embeddings", 131072)
        cap = config.get("final_logit_softcapping")
        self.cap = float(cap) if cap else None


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Return the kind of attention of each layer. If config.json has no layer_types, one layer of
    every six, or as sliding_window_pattern says, has full attention."""
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    kinds = SLIDING_ATTENTION, FULL_ATTENTION
    usual = [kinds[number % every == 0] for number in range(1, layers + 1)]
    return config.get("layer_types") or usual


def _ropes(config: Config) -> dict[str, tuple[float, float]]:
    """Return theta and the position factor of each kind of layer, from new files (rope_parameters)
    or old files."""
    older = {
        SLIDING_ATTENTION: ("rope_local_base_freq", 1e4),
        FULL_ATTENTION: ("rope_theta", 1e6),
    }
    stated = config.get("rope_parameters") or {FULL_ATTENTION: config.get("rope_scaling")}
    ropes = {}
    for kind, (name, base) in older.items():
        part = stated.get(kind) or {}
        how = part.get("rope_type") or part.get("type") or "default"
        if how not in ("default", "linear"):
            raise CheckpointError(f"config.json has rope_type {how!a:.40}: T5Gemma 2 has linear")
        factor = part["factor"] if how == "linear" else 1.0
        theta = part.get("rope_theta") or config.get(name) or base
        ropes[kind] = float(theta), 1 / factor
    return ropes


class T5Gemma2Layer(nn.Module):
    """One layer of either stack. `window` is None if it attends to all positions."""

    def __init__(self, shape: StackConfig, number: int) -> None:
        super().__init__()
        self.window = shape.windows[number]
        heads, (base, scale) = (shape.heads, shape.kv_heads, shape.head_dim), shape.ropes[number]
        rope = nn.RoPE(shape.head_dim, base=base, scale=scale)
        self.self_attn = Attention(shape.hidden_size, *heads, scale=shape.scale, rope=rope)
        for name in ("q_norm", "k_norm"):
            self.self_attn[name] = RMSNorm(shape.head_dim, shape.epsilon)
        self.mlp = MLP(shape.hidden_size, shape.intermediate_size)
        for name in ("self_attn", "feedforward"):
            for place in ("pre", "post"):
                self[f"{place}_{name}_layernorm"] = RMSNorm(shape.hidden_size, shape.epsilon)

    def __call__(self, states: mx.array, attend: Attend) -> mx.array:
        mixed = attend(self.self_attn, self.pre_self_attn_layernorm(states))
        states = states + self.post_self_attn_layernorm(mixed)
        inner = self.mlp(self.pre_feedforward_layernorm(states))
        return states + self.post_feedforward_layernorm(inner)


def _stack(shape: StackConfig) -> nn.Module:
    """Return the layers of the encoder or of the decoder, and the norm after them."""
    stack = nn.Module()
    stack.layers = [T5Gemma2Layer(shape, number) for number in range(len(shape.windows))]
    stack.norm = RMSNorm(shape.hidden_size, shape.epsilon)
    return stack


class T5Gemma2(Network):
    """The network of a whole model without the vision tower. The end-of-image token
    has an embedding of its own, the tensor `eoi_embedding`. Prompts must not contain the image
    token, since there is no tower that reads images."""

    model_type = "t5gemma2"
    merged = True

    def __init__(
        self, encoder: StackConfig, decoder: StackConfig, start: int, end_of_image: int, image: int
    ) -> None:
        super().__init__()
        self.vocabulary, self.width = decoder.vocab_size, decoder.hidden_size
        self.start, self.trained_length = (start,), encoder.longest
        self.heads, self.inner = decoder.heads, decoder.intermediate_size
        self.row = 2 * len(decoder.windows) * decoder.kv_heads * decoder.head_dim
        self._shape, self._end_of_image, self._image = decoder, end_of_image, image
        self.model = nn.Module()
        self.model.encoder, self.model.decoder = _stack(encoder), _stack(decoder)
        self.model.encoder.embed_tokens = nn.Embedding(self.vocabulary, self.width)
        self.model.encoder.eoi_embedding = mx.zeros((self.width,))

    def check_source(self, prompt: Sequence[int]) -> None:
        if self._image in prompt:
            raise PromptError("the prompt has the token of an image, and only text is read here")

    def embed(self, tokens: mx.array) -> mx.array:
        table, image_end = self.model.encoder.embed_tokens, self.model.encoder.eoi_embedding
        scaled = table(tokens) * mx.array(math.sqrt(self.width), dtype=self.dtype)
        return mx.where((tokens == self._end_of_image)[..., None], image_end, scaled)

    def head(self, states: mx.array) -> mx.array:
        logits, cap = self.model.encoder.embed_tokens.as_linear(states), self._shape.cap
        return logits if cap is None else mx.tanh(logits / cap) * cap

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        states = self.embed(tokens)
        for layer in self.model.encoder.layers:
            visible = partial(_visible, layer.window, mask, tokens.shape[1])
            states = layer(states, partial(attend_in_parts, visible))
        return self.model.encoder.norm(states)

    def source_attention(self, layer: nn.Module) -> Attention:
        return layer.self_attn

    def decode(
        self, tokens: mx.array, caches: Caches, source: EncodedSources, place: Place, tables: Tables
    ) -> Iterator[mx.array]:
        starts = [at - n for at, n in zip(place.starts, source.lengths, strict=True)]
        offset = starts[0] if len({*starts}) == 1 else mx.array(starts, dtype=mx.int32)

        def mask(window: int | None) -> Mask:
            if source.by_layer and source.mask is not None:
                # Sources are padded only in training, when a pass runs over complete sequences.
                decoder = place.visible(window)
                padding = mx.repeat(source.mask, place.rows, axis=2)
                return mx.concatenate([padding, decoder], axis=-1)
            if window is not None and window < max(starts) + place.rows:
                # A window limits only the decoder's positions. The source is always visible.
                sources = mx.array(source.lengths)[:, None, None, None]
                return place.visible(window) | (mx.arange(place.end) < sources)
            return place.causal_mask()

        masks = {window: mask(window) for window in {*self._shape.windows}}
        states = self.embed(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            attend = partial(attend_cached, cache, masks[layer.window], offset=offset)
            states = layer(states, attend)
            yield states
        yield self.model.decoder.norm(states)


def _visible(
    window: int | None, mask: mx.array | None, length: int, first: int, last: int
) -> tuple[slice, Mask]:
    """Return the positions that a part of the rows of an encoder layer attends to, and their mask.
    The part begins with row `first` and ends before row `last`.

    Args:
        window: The number of positions that a row attends to; None for all. It reaches equally far
            back and ahead, and one position farther ahead if it is even.
        mask: (batch, 1, 1, length) bool, False for padding. A row of padding attends to itself,
            because a softmax over no keys is undefined.
    """
    back, ahead = (length, length) if window is None else ((window - 1) // 2, window // 2)
    begin, end = max(0, first - back), min(length, last + ahead)
    distances = mx.arange(begin, end) - mx.arange(first, last)[:, None]
    visible = None if window is None else (distances >= -back) & (distances <= ahead)
    if mask is not None:
        real = mask[..., begin:end] | (distances == 0)
        visible = real if visible is None else real & visible
    return slice(begin, end), visible


_NAME = re.compile(
    r"(?:model\.)?(decoder\.(?:layers|norm)\b.*"
    r"|encoder\.(?:text_model\.)?(?:embed_tokens|eoi_embedding|layers|norm)\b.*)"
)


class T5Gemma2Family(EncoderDecoderFamily):
    # The layers are Gemma 3's, and mlx-lm clips hidden states of Gemma 3 in float16.
    overflows = True

    def network(self, config: Config, tensors: Collection[str]) -> Network:
        encoder, decoder = _stacks(config)
        start = whole_number(config, "decoder_start_token_id", decoder.get("bos_token_id", 2))
        named = {"eoi": 256_000, "image": 256_001}
        images = (whole_number(config, f"{name}_token_index", id) for name, id in named.items())
        network = T5Gemma2(StackConfig(encoder), StackConfig(decoder), start, *images)
        if "vision_config" in config["encoder"]:
            network.note = "the vision tower was left out: only text is read here"
        return network

    def places(self, directory: Path, config: Config, weights: Weights) -> dict[str, str]:
        """See `EncoderDecoderFamily`. transformers saves tensors under other names than its modules
        have; both kinds of names are read."""
        found = {name: match[1] for name in weights.infos if (match := _NAME.fullmatch(name))}
        return {
            "model." + name.replace("text_model.", "").replace("embed_tokens.eoi", "eoi"): place
            for place, name in found.items()
        }

    def written_config(self, config: Config, tensors: Collection[str]) -> dict[str, Any]:
        encoder = {k: v for k, v in config["encoder"].items() if k != "vision_config"}
        return {**config, "encoder": encoder}

    def with_layers(self, config: Config, chosen: Sequence[int]) -> dict[str, Any]:
        decoder = _stacks(config)[1]
        kinds = _kinds(decoder, whole_number(decoder, "num_hidden_layers"))
        cut = {"num_hidden_layers": len(chosen), "layer_types": [kinds[n] for n in chosen]}
        return {**config, "decoder": {**decoder, **cut}}


def _stacks(config: Config) -> tuple[Config, Config]:
    """Return the parts of config.json that describe the encoder and the decoder. Raises
    CheckpointError."""
    encoder, decoder = config.get("encoder"), config.get("decoder")
    text = encoder.get("text_config") if isinstance(encoder, Mapping) else None
    if not isinstance(text, Mapping) or not isinstance(decoder, Mapping):
        raise CheckpointError("config.json lacks encoder.text_config or decoder")
    return text, decoder


family = T5Gemma2Family()
