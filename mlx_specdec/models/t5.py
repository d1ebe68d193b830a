"""T5, mT5, UMT5, ByT5 and MADLAD-400: the network, whose layers are named as in Hugging Face
checkpoints, and the family, which reads checkpoints; see `loading.Family`."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.nn.layers.distributed import shard_inplace

from ..checkpoints import files
from ..checkpoints.files import LM_HEAD, whole_number
from ..checkpoints.tensors import MOST_LAYERS
from ..text.tokenizer import Tokenizer
from .distributed.sharding import check_even, shard_inputs
from .encoder_decoder import layers
from .encoder_decoder.context import Caches, EncodedSources, Network, Tables
from .encoder_decoder.family import EncoderDecoderFamily, Languages
from .encoder_decoder.layers import (
    Attend,
    Attention,
    KeysValues,
    Mask,
    attend_cached,
    attend_in_parts,
)
from .number_format import same_matrix
from .rows import Place

TRAINED_LENGTH, LONGER = 512, 1024
"""Default number of tokens of a source in pretraining. TRAINED_LENGTH is T5's (Raffel et al., arXiv
1910.10683, section 3.1.2). LONGER holds for mT5 (2010.11934), UMT5 and ByT5 (2105.13626)."""


class T5Config:
    """The shapes and switches of one T5. Raises CheckpointError if config.json is not supported.

    Attributes:
        gated: Whether feed-forward networks are gated.
        trained_length: Tokens of the longest sources in training.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        kind = config.get("model_type")
        # The defaults of transformers.
        default = "relu" if kind == "t5" else "gated-gelu"
        projection = str(config.get("feed_forward_proj") or default)
        activation = projection.removeprefix("gated-")
        layers.check_activation("feed_forward_proj", activation)
        self.vocab_size = whole_number(config, "vocab_size")
        self.d_model, self.d_kv = whole_number(config, "d_model"), whole_number(config, "d_kv")
        self.d_ff, self.num_heads = whole_number(config, "d_ff"), whole_number(config, "num_heads")
        depth = self.num_layers = whole_number(config, "num_layers", most=MOST_LAYERS)
        self.num_decoder_layers = whole_number(config, "num_decoder_layers", depth, MOST_LAYERS)
        self.num_buckets = whole_number(config, "relative_attention_num_buckets", 32)
        self.max_distance = whole_number(config, "relative_attention_max_distance", 128)
        self.epsilon = float(config.get("layer_norm_epsilon") or 1e-6)
        self.gated = projection != activation
        # In a T5, "gated-gelu" means the tanh approximation.
        self.activation = "gelu_new" if projection == "gated-gelu" else activation
        names = "decoder_start_token_id", "pad_token_id"
        start = next((name for name in names if config.get(name) is not None), names[0])
        self.decoder_start_token_id = whole_number(config, start, 0, self.vocab_size - 1, least=0)
        self.bias_per_layer = kind == "umt5"
        self.scales_output = scales_output(config)
        is_byt5 = config.get("tokenizer_class") == "ByT5Tokenizer"
        usual = LONGER if is_byt5 or kind in ("mt5", "umt5") else TRAINED_LENGTH
        length = config.get("n_positions") or usual
        self.trained_length = whole_number({"n_positions": length}, "n_positions")


def scales_output(config: Mapping[str, Any]) -> bool:
    """Return whether a T5 scales the decoder's output by d_model ** -0.5 before the head.

    This is not the same as whether the head is tied: transformers 5 saves every T5 with
    tie_word_embeddings: true, and states the scaling in scale_decoder_outputs."""
    stated = config.get("scale_decoder_outputs")
    if stated is not None:
        return bool(stated)
    if config.get("model_type") == "mt5":
        return False
    return config.get("tie_word_embeddings") is not False


class Dense(nn.Module):
    """The feed-forward network, gated or not."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self._names = ("wi_0", "wi_1") if config.gated else ("wi",)
        self._act = layers.ACTIVATIONS[config.activation]
        for name in self._names:
            self[name] = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.wo = nn.Linear(config.d_ff, config.d_model, bias=False)

    def __call__(self, states: mx.array) -> mx.array:
        inner = self._act(self[self._names[0]](states))
        if len(self._names) > 1:
            inner = inner * self[self._names[1]](states)
        return self.wo(inner)


class T5Block(nn.Module):
    """One layer of a stack, whose parts are numbered and named as in the checkpoints. Attention
    scores are not scaled."""

    def __init__(self, config: T5Config, *, has_bias: bool, is_decoder: bool) -> None:
        super().__init__()
        parts: dict[str, nn.Module] = {}
        for name in ("SelfAttention", "EncDecAttention") if is_decoder else ("SelfAttention",):
            sizes = config.d_model, config.num_heads, config.num_heads, config.d_kv
            parts[name] = Attention(*sizes, scale=1.0, names="qkvo")
        if has_bias:
            table = nn.Embedding(config.num_buckets, config.num_heads)
            parts["SelfAttention"].relative_attention_bias = table
        parts["DenseReluDense"] = Dense(config)
        self.layer = [nn.Module() for _ in parts]
        for place, (name, part) in zip(self.layer, parts.items(), strict=True):
            place[name] = part
            place.layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def __call__(
        self, states: mx.array, attend: Attend, source: KeysValues = (), hidden: Mask = None
    ) -> mx.array:
        """Run the block over states, (batch, m, d_model). `Attend` explains the arguments."""
        first, *cross, last = self.layer
        states = states + attend(first.SelfAttention, first.layer_norm(states))
        for part in cross:
            states = states + part.EncDecAttention(part.layer_norm(states), source, hidden)
        return states + last.DenseReluDense(last.layer_norm(states))


def buckets(distances: np.ndarray, count: int, farthest: int, *, both_ways: bool) -> np.ndarray:
    """Return the bucket of each relative position (Raffel et al., section 2.1). Small distances
    have buckets of their own, larger ones share buckets of logarithmic width.

    Args:
        distances: Key position minus query position.
        farthest: The distance from which on all share the last bucket.
        both_ways: Whether keys after the query have buckets of their own, as in the encoder.
    """
    result = np.zeros_like(distances)
    if both_ways:
        count //= 2
        result += (distances > 0) * count
        distances = np.abs(distances)
    else:
        distances = np.maximum(-distances, 0)
    exact = count // 2
    ratio = np.log(np.maximum(distances, 1).astype(np.float32) / exact) / np.log(farthest / exact)
    far = np.minimum(exact + (ratio * (count - exact)).astype(np.int64), count - 1)
    return result + np.where(distances < exact, distances, far)


class T5Stack(nn.Module):
    """The encoder, or the decoder without the head. The embedding is shared and not included."""

    def __init__(self, config: T5Config, depth: int, *, is_decoder: bool) -> None:
        super().__init__()
        self._config = config
        self._is_decoder = is_decoder
        self.block = [
            T5Block(config, has_bias=index == 0 or config.bias_per_layer, is_decoder=is_decoder)
            for index in range(depth)
        ]
        self.final_layer_norm = nn.RMSNorm(config.d_model, config.epsilon)

    def bias_tables(self, reach: int) -> list[mx.array]:
        """Return a table (heads, width) for each layer with a bias of its own. Column reach - 1 +
        (key - query) has the score bias of the relative position key - query. The decoder's tables
        end with `reach` columns of -inf for keys after the query."""
        config = self._config
        ahead = 0 if self._is_decoder else reach - 1
        distances, both = np.arange(1 - reach, ahead + 1), not self._is_decoder
        index = mx.array(
            buckets(distances, config.num_buckets, config.max_distance, both_ways=both)
        )
        tables = []
        for block in self.block if config.bias_per_layer else self.block[:1]:
            table = block.layer[0].SelfAttention.relative_attention_bias(index).T
            if self._is_decoder:
                hidden = mx.full((table.shape[0], reach), -mx.inf, dtype=table.dtype)
                table = mx.concatenate([table, hidden], axis=1)
            tables.append(table)
        return tables

    def source_biases(self, length: int, rows: int) -> list[mx.array]:
        """Return the score bias, (1, heads, rows, width), of each encoder layer for the last `rows`
        positions of a source. The bias of earlier rows is a window of these columns, shifted to the
        right."""
        last = (length - 1) // rows * rows
        positions = np.arange(last, last + rows)[None]
        return self.masks(self.bias_tables(last + rows), positions, last + length)

    def masks(
        self, tables: Sequence[mx.array], positions: np.ndarray, width: int
    ) -> list[mx.array]:
        """Return what each layer adds to its scores of `width` keys, (batch, heads, rows, width).
        `positions`, (batch, rows), has one row if all sequences have the same positions."""
        reach = (tables[0].shape[1] + 1) // 2
        if positions.size == 1:
            first = reach - 1 - int(positions[0, 0])
            masks = [table[None, :, None, first : first + width] for table in tables]
        else:
            index = mx.array(reach - 1 + np.arange(width) - positions[..., None])
            masks = [mx.take(table, index, axis=1).swapaxes(0, 1) for table in tables]
        return masks * (len(self.block) // len(masks))


class T5(Network):
    """The network of a whole T5. `own_head` says whether the head is a matrix of its own, and not
    the embedding."""

    model_type = "t5"

    def __init__(self, config: T5Config, *, own_head: bool) -> None:
        super().__init__()
        self.config = config
        self.vocabulary, self.width = config.vocab_size, config.d_model
        self.start = (config.decoder_start_token_id,)
        self.trained_length = config.trained_length
        self.heads, self.inner = config.num_heads, config.d_ff
        self.row = 2 * config.num_decoder_layers * config.num_heads * config.d_kv
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = T5Stack(config, config.num_layers, is_decoder=False)
        self.decoder = T5Stack(config, config.num_decoder_layers, is_decoder=True)
        if own_head:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)

    @property
    def layers(self) -> Sequence[nn.Module]:
        return list(self.decoder.block)

    def shard(self, group: mx.distributed.Group) -> None:
        """Keep only this rank's heads and its part of the feed-forward networks, without computing
        anything yet. Raises OptionError if quantization groups would have to be split."""
        for part in self.modules():
            for name in ("q", "k", "v", "wi", "wi_0", "wi_1"):
                if name in part:
                    shard_inplace(part[name], "all-to-sharded", group=group)
            for name in ("o", "wo"):
                if name in part:
                    part[name] = shard_inputs(part[name], group)
            if "relative_attention_bias" in part:
                # The rows of the table are buckets, and the columns are heads.
                shard_inplace(part.relative_attention_bias, lambda path, table: 1, group=group)
        for name in ("heads", "inner", "row"):
            setattr(self, name, getattr(self, name) // group.size())

    def encode(self, tokens: mx.array, mask: mx.array | None = None) -> mx.array:
        length = tokens.shape[1]
        states = self.shared(tokens)
        biases = self.encoder.source_biases(length, min(length, layers.SOURCE_ROWS))

        def visible(bias: mx.array, first: int, last: int) -> tuple[slice, mx.array]:
            nearest = bias.shape[-1] - length - first
            part = bias[:, :, : last - first, nearest : nearest + length]
            return slice(None), part if mask is None else mx.where(mask, part, -mx.inf)

        for block, bias in zip(self.encoder.block, biases, strict=True):
            states = block(states, partial(attend_in_parts, partial(visible, bias)))
        return self.encoder.final_layer_norm(states)

    def source_attention(self, layer: nn.Module) -> Attention:
        return layer.layer[1].EncDecAttention

    def tables(self, reach: int) -> list[mx.array]:
        return self.decoder.bias_tables(reach)

    def decode(
        self, tokens: mx.array, caches: Caches, source: EncodedSources, place: Place, tables: Tables
    ) -> Iterator[mx.array]:
        positions = place.positions[:1] if place.even else place.positions
        masks = self.decoder.masks(tables, positions, place.end)
        states = self.shared(tokens)
        for block, cache, pair, mask in zip(
            self.decoder.block, caches, source.by_layer, masks, strict=True
        ):
            states = block(states, partial(attend_cached, cache, mask), pair, source.mask)
            yield states
        states = self.decoder.final_layer_norm(states)
        yield states * self.config.d_model**-0.5 if self.config.scales_output else states

    def embed(self, tokens: mx.array) -> mx.array:
        return self.shared(tokens)

    def head(self, states: mx.array) -> mx.array:
        return self.lm_head(states) if "lm_head" in self else self.shared.as_linear(states)


Config = Mapping[str, Any]
SHARED_EMBEDDING = "shared.weight"
TWINS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# Tensors that are not read: copies of shared.weight, and a bias in old checkpoints that is unused.
_DROPPED = re.compile(
    r"(encoder|decoder)\.embed_tokens\.weight"
    r"|decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight"
)


class T5Family(EncoderDecoderFamily):
    # T5 was trained in bfloat16, and some hidden states exceed float16's maximum of 65,504.
    overflows = True
    # If config.json lacks num_decoder_layers, the decoder has as many layers as the encoder.
    decoder_depth = "num_decoder_layers"

    def network(self, config: Config, tensors: Collection[str]) -> Network:
        return T5(T5Config(config), own_head=LM_HEAD in tensors)

    def check_shares(self, config: Config, ranks: int) -> None:
        shape = T5Config(config)
        parts = {"attention heads": shape.num_heads, "feed-forward columns": shape.d_ff}
        check_even(parts, ranks)

    def places(self, directory: Path, config: Config, weights: files.Weights) -> dict[str, str]:
        """See `EncoderDecoderFamily`. `shared` may be stored only under the name of a copy. A head
        that repeats `shared` is left out."""
        places = {name: name for name in weights.infos if not _DROPPED.fullmatch(name)}
        twins = [name for name in TWINS if name in weights.infos]
        if SHARED_EMBEDDING not in places and twins:
            places[SHARED_EMBEDDING] = twins[0]
        shared = places.get(SHARED_EMBEDDING)
        repeats = LM_HEAD in places and shared and same_matrix(LM_HEAD, shared, weights)
        return {n: p for n, p in places.items() if not (repeats and n.startswith("lm_head."))}

    def written_config(self, config: Config, tensors: Collection[str]) -> dict[str, Any]:
        return {
            **config,
            "tie_word_embeddings": LM_HEAD not in tensors,
            "scale_decoder_outputs": scales_output(config),
        }

    def languages(self, network: Network, tokenizer: Tokenizer) -> Languages | None:
        """See `loading.Family`. MADLAD-400 has a tag for every language (Kudugunta et al., arXiv
        2309.04662)."""
        return Languages.of(tokenizer, "<2{}>")


family = T5Family()
