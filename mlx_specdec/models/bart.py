"""BART, mBART, Marian, M2M100, NLLB and Pegasus: the network, whose layers are named as in Hugging
Face checkpoints, and the family, which reads checkpoints; see `loading.Family`."""

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..checkpoints import files
from ..checkpoints.disk import read_json
from ..checkpoints.files import LM_HEAD, whole_number
from ..checkpoints.quantization import ALL_PARTS
from ..checkpoints.tensors import MOST_LAYERS
from ..errors import CheckpointError
from ..text.tokenizer import Tokenizer
from .base import LoadSettings
from .encoder_decoder import layers
from .encoder_decoder.context import Caches, EncodedSources, Network, Tables
from .encoder_decoder.family import Encode, EncoderDecoderFamily, Languages
from .encoder_decoder.layers import Attend, KeysValues, Mask, attend_cached, attend_in_parts
from .number_format import same_matrix
from .rows import Place

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")
OFFSET = 2
"""Number of unused rows at the beginning of a learned table of positions."""


POSITIONS = {
    **dict.fromkeys(("bart", "mbart"), "learned"),
    **dict.fromkeys(("marian", "pegasus"), "marian"),
    "m2m_100": "m2m",
}
"""The positions of each model_type: a learned table, or the sines and cosines of Marian or of
M2M100. The model_type of NLLB is m2m_100."""
USUAL = {
    "activation_function": "gelu",
    "bad_words_ids": (),
    "decoder_start_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "scale_embedding": False,
    "share_encoder_decoder_embeddings": True,
}
"""Defaults for entries that config.json may lack."""
USUAL_OF_TYPE: Mapping[str, Mapping[str, Any]] = {
    "bart": {},
    "mbart": {"decoder_start_token_id": None},
    "marian": {"pad_token_id": -1, "decoder_start_token_id": None, "eos_token_id": 0},
    "m2m_100": {"activation_function": "relu", "scale_embedding": True},
    "pegasus": {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1},
}
"""The other defaults of each model_type."""


StackShape = tuple[int, int, int]
"""The number of layers of a stack, the heads per layer, and the inner feed-forward width."""


class BartConfig:
    """The shapes and switches of one model. Raises CheckpointError if config.json is not supported.

    Attributes:
        norm_first: Whether a layer norms the input of each part, and a norm ends each stack.
            Otherwise a layer norms the sum of the part's output and the residual.
        embedding_norm: Whether a norm follows the embedding.
        positions: See POSITIONS.
        vocab_size, source_size: Sizes of the decoder's and of the encoder's vocabulary.
        shared: Whether both have the same embedding.
        max_length: Maximum number of positions of a source and of a decoder sequence.
        scales: Whether embeddings are multiplied by the square root of the width.
        start: The first tokens of every decoder sequence, including forced tokens.
        needs_language: Whether a decoder sequence needs a language token at its beginning.
        in_place: Whether the language token replaces the start token.
        banned: Tokens that are never generated.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config["model_type"]
        stated = {name: value for name, value in config.items() if value is not None}
        stated = {**USUAL, **USUAL_OF_TYPE[kind], **stated}
        translates = kind in ("mbart", "m2m_100")
        self.norm_first = kind not in ("bart", "marian")
        self.embedding_norm = kind in ("bart", "mbart")
        self.positions = POSITIONS[kind]
        self.source_size = whole_number(config, "vocab_size")
        self.vocab_size = whole_number(config, "decoder_vocab_size", self.source_size)

        def token(name: str) -> int | None:
            largest = self.vocab_size - 1
            return None if stated.get(name) is None else whole_number(stated, name, 0, largest, 0)

        self.shared: bool = stated["share_encoder_decoder_embeddings"]
        self.d_model = whole_number(config, "d_model")
        # The entry num_hidden_layers is not read: it repeats the number of encoder layers.
        self.encoder, self.decoder = _stack(config, "encoder"), _stack(config, "decoder")
        self.activation = str(stated["activation_function"])
        layers.check_activation("activation_function", self.activation)
        self.max_length = whole_number(config, "max_position_embeddings", 1024)
        self.scales: bool = stated["scale_embedding"]
        self.pad = whole_number(stated, "pad_token_id", least=-1)
        ends = stated["eos_token_id"]
        self.end: int = ends[0] if isinstance(ends, list) else ends
        first, forced = token("decoder_start_token_id"), token("forced_bos_token_id")
        begin = self.end if first is None else first, forced
        self.start: tuple[int, ...] = tuple(id for id in begin if id is not None)
        self.needs_language = translates and forced is None and first in (None, self.end)
        self.in_place = translates and first != self.end
        words = (word[0] for word in stated["bad_words_ids"] if len(word) == 1)
        self.banned = tuple(id for id in words if 0 <= id < self.vocab_size)

    @property
    def rows(self) -> int:
        """The number of rows of the table of positions."""
        before = {"learned": OFFSET, "marian": 0, "m2m": self.pad + 1}
        return self.max_length + before[self.positions]


def _stack(config: Mapping[str, Any], stack: str) -> StackShape:
    heads, inner = (whole_number(config, f"{stack}_{n}") for n in ("attention_heads", "ffn_dim"))
    return whole_number(config, f"{stack}_layers", most=MOST_LAYERS), heads, inner


class BartLayer(nn.Module):
    """One layer of a stack: attention, attention to the source in a decoder, feed-forward."""

    def __init__(self, config: BartConfig, shape: StackShape, *, is_decoder: bool) -> None:
        super().__init__()
        width, (_, heads, inner) = config.d_model, shape
        head_dim = width // heads
        how: dict[str, Any] = {"scale": head_dim**-0.5, "bias": True, "names": PROJECTIONS}
        self._norm_first = config.norm_first
        self._act = layers.ACTIVATIONS[config.activation]
        for name in ("self_attn", "encoder_attn") if is_decoder else ("self_attn",):
            self[name] = layers.Attention(width, heads, heads, head_dim, **how)
            self[f"{name}_layer_norm"] = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.final_layer_norm = nn.LayerNorm(width)

    def __call__(
        self, states: mx.array, attend: Attend, source: KeysValues = (), hidden: Mask = None
    ) -> mx.array:
        """Run the layer over states, (batch, m, d_model). `Attend` explains the arguments."""

        def feed_forward(normed: mx.array) -> mx.array:
            return self.fc2(self._act(self.fc1(normed)))

        states = self._part(states, "self_attn", partial(attend, self.self_attn))
        if source:
            cross = partial(self.encoder_attn, attended=source, mask=hidden)
            states = self._part(states, "encoder_attn", cross)
        return self._part(states, "final", feed_forward)

    def _part(self, states: mx.array, name: str, part: Callable[[mx.array], mx.array]) -> mx.array:
        norm = self[f"{name}_layer_norm"]
        return states + part(norm(states)) if self._norm_first else norm(states + part(states))


def sinusoids(config: BartConfig) -> mx.array:
    """Return the table of sinusoidal positions, (rows, d_model) float32, with sines in the first
    half of the columns and cosines in the second.

    M2M100's table is computed in float32 and divides by half of the width minus one. It has rows
    before the first position; the row of padding is zero."""
    width, half = config.d_model, config.d_model // 2
    rows = np.arange(config.rows, dtype=np.float32)[:, None]
    if config.positions == "m2m":
        step = np.float32(math.log(10000) / (half - 1))
        angles = rows * np.exp(-step * np.arange(half, dtype=np.float32))
        table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
        table[config.pad] = 0
        table = np.pad(table, [(0, 0), (0, width - 2 * half)])
    else:
        angles = rows * 10000.0 ** (-2.0 * np.arange(width - half) / width)
        table = np.concatenate([np.sin(angles), np.cos(angles[:, :half])], axis=1)
    return mx.array(table.astype(np.float32))


class BartStack(nn.Module):
    """The encoder, or the decoder without the head. It has an embedding of its own (`embed_tokens`)
    only if the encoder and the decoder do not share one."""

    def __init__(self, config: BartConfig, *, is_decoder: bool) -> None:
        super().__init__()
        width = config.d_model
        if not config.shared:
            self.embed_tokens = nn.Embedding(
                config.vocab_size if is_decoder else config.source_size, width
            )
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.rows, width)
        self.layernorm_embedding = nn.LayerNorm(width) if config.embedding_norm else nn.Identity()
        shape = config.decoder if is_decoder else config.encoder
        self.layers = [BartLayer(config, shape, is_decoder=is_decoder) for _ in range(shape[0])]
        self.layer_norm = nn.LayerNorm(width) if config.norm_first else nn.Identity()


class Bart(Network):
    """The network of a whole model. `has_bias` says whether the logits have a bias."""

    model_type = "bart"

    def __init__(self, config: BartConfig, *, has_bias: bool) -> None:
        super().__init__()
        self.config = config
        self.vocabulary, self.width, self.start = config.vocab_size, config.d_model, config.start
        self.max_length = self.trained_length = config.max_length
        _, self.heads, self.inner = config.encoder
        self.row = 2 * config.decoder[0] * config.d_model
        if not config.shared:
            self.source_vocabulary = config.source_size
        self.model = nn.Module()
        self.model.encoder = BartStack(config, is_decoder=False)
        self.model.decoder = BartStack(config, is_decoder=True)
        if config.shared:
            self.model.shared = nn.Embedding(config.vocab_size, config.d_model)
        if has_bias:
            self.final_logits_bias = mx.zeros((1, config.vocab_size))
        if config.positions != "learned":
            self._sinusoids = sinusoids(config)
        self._banned = mx.array(config.banned, dtype=mx.int32)

    @property
    def table(self) -> nn.Embedding:
        """The decoder's embedding, which is also the output head."""
        return self.model.shared if self.config.shared else self.model.decoder.embed_tokens

    def embed(self, tokens: mx.array) -> mx.array:
        if not self.config.shared:
            # Prompt lookup proposes tokens of the source, which the decoder may lack.
            tokens = mx.minimum(tokens, self.config.vocab_size - 1)
        return self._scaled(self.table(tokens))

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        encoder, config = self.model.encoder, self.config
        table = self.table if config.shared else encoder.embed_tokens
        positions = mx.arange(tokens.shape[1])
        if config.positions == "m2m":
            # Positions count only tokens that are not padding, even if padding comes first.
            counted = tokens != config.pad
            positions = mx.where(counted, mx.cumsum(counted.astype(mx.int32), axis=1) - 1, -1)
        states = self._scaled(table(tokens)) + self._rows(encoder, positions)
        states = encoder.layernorm_embedding(states)
        attend = partial(attend_in_parts, lambda *_: (slice(None), mask))
        for layer in encoder.layers:
            states = layer(states, attend)
        return encoder.layer_norm(states)

    def source_attention(self, layer: nn.Module) -> layers.Attention:
        return layer.encoder_attn

    def decode(
        self, tokens: mx.array, caches: Caches, source: EncodedSources, place: Place, tables: Tables
    ) -> Iterator[mx.array]:
        mask: Mask = "causal" if place.rows > 1 else None
        positions = mx.arange(place.starts[0], place.end)
        if not place.even:
            positions, mask = place.columns, place.visible()
        decoder, config = self.model.decoder, self.config
        # Padding after a sequence of a batch may exceed the table.
        positions = mx.minimum(positions, config.max_length - 1)
        if config.positions == "m2m":
            positions = mx.where(tokens == config.pad, -1, positions)
        states = self.embed(tokens) + self._rows(decoder, positions)
        states = decoder.layernorm_embedding(states)
        for layer, cache, pair in zip(decoder.layers, caches, source.by_layer, strict=True):
            states = layer(states, partial(attend_cached, cache, mask), pair, source.mask)
            yield states
        yield decoder.layer_norm(states)

    def head(self, states: mx.array) -> mx.array:
        logits = self.table.as_linear(states)
        if "final_logits_bias" in self:
            logits = logits + self.final_logits_bias
        if self.config.banned:
            logits[..., self._banned] = -mx.inf
        return logits

    def _scaled(self, states: mx.array) -> mx.array:
        return states * self.config.d_model**0.5 if self.config.scales else states

    def _rows(self, stack: BartStack, positions: mx.array) -> mx.array:
        """Return the rows of the table of positions. Position -1 stands for padding in M2M100."""
        config = self.config
        if config.positions == "learned":
            return stack.embed_positions(positions + OFFSET)
        if config.positions == "m2m":
            positions = mx.where(positions < 0, config.pad, positions + config.pad + 1)
        return self._sinusoids[positions].astype(self.dtype)


Config = Mapping[str, Any]
GENERATION = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")
"""Entries that old checkpoints have in config.json, and newer ones in generation_config.json."""
LOGITS_BIAS = "final_logits_bias"
TABLES = ("model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
_CODE = re.compile(r"__(\w+)__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})", re.ASCII)
ENGLISH = ("en", "eng_Latn", "en_XX")
"""The default language of sources is the first of these codes that the model has."""
MBART_50 = 26
"""A model with at least this many languages is an mBART-50. mBART has 25."""


class Codes(Languages):
    """The languages of a model that has a token for each. The language token begins a completion,
    after the decoder's start token or in place of it. In a source, it is the first token if `first`
    is true, otherwise the last."""

    def __init__(self, tokens: Mapping[str, int], config: BartConfig, *, first: bool) -> None:
        super().__init__(tokens)
        self.required = config.needs_language
        self._config, self._first = config, first
        self._default = next(code for code in (*ENGLISH, *tokens) if code in tokens)

    def source(
        self, text: str, encode: Encode, source: str | None, target: str | None
    ) -> list[int]:
        # Remove the language token that the tokenizer may have added.
        ids, end, codes = encode(text), self._config.end, {*self.known.values()}
        while ids and ids[-1] in {end, *codes}:
            ids.pop()
        while ids and ids[0] in codes:
            ids.pop(0)
        code = self.known[source or self._default]
        return [code, *ids, end] if self._first else [*ids, end, code]

    def prefix(self, start: Sequence[int], target: str | None) -> list[int]:
        if target is None:
            return [*start]
        return [*([] if self._config.in_place else start[:1]), self.known[target]]

    def find(self, option: str, name: str | None) -> str | None:
        return super().find(option, name and name.strip("_"))


class BartFamily(EncoderDecoderFamily):
    def load(self, directory: Path, config: Config, how: LoadSettings) -> Any:
        file = directory / "generation_config.json"
        stored = read_json(file) if file.is_file() else {}
        generation = {name: stored[name] for name in GENERATION if stored.get(name) is not None}
        return super().load(directory, {**config, **generation}, how)

    def network(self, config: Config, tensors: Collection[str]) -> Network:
        return Bart(BartConfig(config), has_bias=LOGITS_BIAS in tensors)

    def places(self, directory: Path, config: Config, weights: files.Weights) -> dict[str, str]:
        """See `EncoderDecoderFamily`. Checkpoints without a head omit the prefix "model.". A shared
        embedding may be stored under the name of any of its copies."""
        shape, stored = BartConfig(config), weights.infos
        inside = ("encoder.", "decoder.", "shared.")
        places = {f"model.{name}" if name.startswith(inside) else name: name for name in stored}
        wanted = "model.shared" if shape.shared else "model.decoder.embed_tokens"
        copies = TABLES if shape.shared else TABLES[2:]
        for part in ALL_PARTS:
            found = [places.pop(f"{table}.{part}", None) for table in copies]
            first = next((place for place in found if place is not None), None)
            if first is not None:
                places.setdefault(f"{wanted}.{part}", first)
        table = places.get(f"{wanted}.weight", "")
        if {LM_HEAD, table} <= stored.keys() and not same_matrix(LM_HEAD, table, weights):
            raise CheckpointError("the model has a head that is not its embedding")
        learned = shape.positions == "learned"
        return {n: place for n, place in places.items() if learned or "embed_positions." not in n}

    def languages(self, network: Bart, tokenizer: Tokenizer) -> Languages | None:
        kind = network.config.positions
        if kind == "marian":
            return Languages.of(tokenizer, ">>{}<<")
        pieces = tokenizer.pieces
        matches = ((id, _CODE.fullmatch(pieces[id] or "")) for id in tokenizer.special_ids)
        codes = {match[1] or match[2]: id for id, match in matches if match}
        if len(codes) < 2:
            return None
        first = not tokenizer.legacy if kind == "m2m" else len(codes) >= MBART_50
        return Codes(codes, network.config, first=first)


family = BartFamily()
