"""DFlash, which drafts a block of tokens in one pass, and two extensions.

DSpark has two more heads. The Markov head adds a bias to the logits of a slot, depending on the
token before it. The confidence head estimates how likely each slot is to be accepted. DFlash 2 has
short convolutions around the parts of each layer, and a selector that scores each slot's likeliest
tokens again. Source: arXiv 2602.06036 (DFlash), arXiv 2607.05147 (DSpark), z-lab/dflash (DFlash 2),
and the files of `speculators`."""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial, reduce
from operator import and_
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from ...largest import indices_of_largest
from ..encoder_decoder.layers import attend_cached
from ..rows import Place
from .files import ConfigEntries, DrafterFiles, is_named, nested, read_layers
from .layers import GATED, MUSE_GLIMMER, DrafterLayer, Source, adapted, layer_of
from .network import Config, DrafterContext, DrafterNetwork

MARKOV = ("vanilla", "gated", "rnn")
W1 = "markov_head.markov_w1.weight"
CONFIDENCE = "confidence_head.proj.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"
FREQUENCIES = 64
"""Number of frequencies that represent the noise level of a slot."""


def _usual_layers(count: int, layers: int) -> tuple[int, ...]:
    """Return layers at even distances, from the second to the third from the end."""
    if count == 1:
        return (layers // 2,)
    return tuple(round(1 + at * (layers - 4) / (count - 1)) for at in range(count))


def _own_name(name: str) -> str:
    name = name.removeprefix("model.").removeprefix("encoder.")
    name = name.replace("output_norm_enc.", "hidden_norm.")
    # A codebook may be stored as a plain parameter.
    return re.sub(r"_codebook$", "_codebook.weight", name)


def _sight(settings: ConfigEntries, layers: int, kind: str) -> tuple[tuple[int | None, bool], ...]:
    """Return for each layer how many positions it looks back, or None without a limit, and whether
    a slot attends only to itself and to slots before it. If config.json does not say the latter,
    layers with a window are causal, except in a DFlash 2 of `speculators`."""
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers or not {*kinds} <= {"full_attention", "sliding_attention"}:
        raise settings.wrong("layer_types", "full_attention or sliding_attention for each layer")
    sliding = [kind == "sliding_attention" for kind in kinds]
    windows = [int(settings["sliding_window"]) if slides else None for slides in sliding]
    names = ("is_causal", "causal", "dflash_query_causal")
    if (stated := next((settings[name] for name in names if name in settings), None)) is not None:
        return tuple((window, bool(stated)) for window in windows)
    seeing = kind == "dflash2" and "speculators_model_type" in settings
    if settings.get("sliding_window_non_causal", seeing):
        return tuple((window, False) for window in windows)
    return tuple(zip(windows, sliding, strict=True))


def _drafts_first(settings: ConfigEntries, kind: str, slots: int) -> bool:
    """Return whether the first slot, which holds the newest token, drafts the token after it."""
    if (stated := settings.get("sample_from_anchor")) is not None:
        return bool(stated)
    if settings.layered and kind == "dspark":
        # `speculators` has always written the number of draft tokens, and later the entry above.
        return settings.get("speculative_tokens") == slots
    return kind == "dspark" and not settings.get("dspark_bonus_anchor")


class MarkovHead(nn.Module):
    """The head that adds a bias to the logits of a slot, computed from the token before the slot.
    Parameters are named as in files. `rank` is the rank of the matrices."""

    def __init__(self, files: DrafterFiles, rank: int) -> None:
        super().__init__()
        kind, width = files.settings.get("markov_head_type", "vanilla"), files.sizes.width
        if kind not in MARKOV:
            raise files.settings.wrong("markov_head_type", " or ".join(MARKOV))
        self._kind = kind
        self.markov_w1 = nn.Embedding(files.vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, files.drafted, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def latent(
        self, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the inputs of `markov_w2`, (batch, 1, rank), whose output is the bias, and
        `carried` for the next slot.

        Args:
            token: The tokens before the slot, (batch, 1) int32.
            state: The slot's states, (batch, 1, width).
            carried: The recurrent state of the type "rnn"; None for the first slot.
        """
        latent = self.markov_w1(token)
        if self._kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([state, latent], axis=-1)))
            latent = gate * latent
        if self._kind == "rnn":
            memory = mx.zeros_like(latent) if carried is None else carried
            joint = self.joint_proj(mx.concatenate([memory, latent, state], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            carried = gate * memory + (1 - gate) * mx.tanh(candidate)
            latent = mx.tanh(output)
        return latent, carried


class DFlash(DrafterNetwork):
    """The network of a DFlash, or of a DSpark with its two heads.

    Attributes:
        slots: Number of slots of a block, including the slot of the newest token.
        skipped: Number of slots at the beginning that draft no token.
        mask_token: The input token of slots that are to be drafted.
        window_behind_block: Whether a window is counted from the block's first slot. Otherwise it
            is counted from the slot that looks back.
    """

    layer_class: type[DrafterLayer] = DrafterLayer

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        named = is_named(config, r"\w*DFlash\w*") or config.get("model_type") == MUSE_GLIMMER
        return named or isinstance(config.get("dflash_config"), Mapping)

    @staticmethod
    def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
        files = read_layers(
            kind,
            directory,
            adapted(config),
            weights,
            own_name=_own_name,
            ids="aux_hidden_state_layer_ids",
            usual_count=5,
            usual_layers=_usual_layers,
            usual_vocabulary=151936,  # Qwen 3's
            # Training freezes the embedding and the head.
            copies=("embed_tokens.weight", "lm_head.weight"),
        )
        # DeepSpec's trainer writes the target's type.
        copied = files.settings.layered or is_named(config, r"\w*DSparkModel")
        types = (None, "qwen3", "llama", "speculator_model", MUSE_GLIMMER)
        if config.get("model_type") not in types and not copied:
            raise files.settings.wrong("model_type", "qwen3")
        if files.settings.get(GATED):  # Qwen 3.5's layers, whose norms are stored minus 1
            for name in files.tensors:
                if name.endswith("norm.weight"):
                    stored = files.tensors.data[name]
                    files.tensors[name] = lambda stored=stored: stored() + 1
        if kind == "dflash2" and files.target_ids is not None:
            raise files.settings.wrong("draft_vocab_size", "the target's whole vocabulary")
        return files

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        sizes, settings = files.sizes, files.settings
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self.layers = [layer_of(files, n, self.layer_class) for n in range(sizes.count)]
        if rank := files.tensors.shapes.get(W1, (settings.get("markov_rank", 0),))[-1]:
            self.markov_head = MarkovHead(files, int(rank))
        if CONFIDENCE in files.tensors:
            inputs = files.tensors.shapes[CONFIDENCE][1]
            self.confidence_head = nn.Module()
            self.confidence_head.proj = nn.Linear(inputs, 1, bias=CONFIDENCE_BIAS in files.tensors)
            self._is_told_token = inputs != sizes.width
        self.sight = _sight(settings, sizes.count, files.kind)
        self.window_behind_block = settings.layered
        self.slots = int(settings.get("block_size", 8))
        self.skipped = int(not _drafts_first(settings, files.kind, self.slots))
        if settings.get("log_snr_conditioning"):
            self.log_snr_embed = nn.Module()
            self.log_snr_embed.fc1 = nn.Linear(2 * FREQUENCIES, sizes.width)
            self.log_snr_embed.fc2 = nn.Linear(sizes.width, sizes.width)
            levels = mx.where(mx.arange(self.slots) == 0, 1000.0, 0.0)[:, None]
            angles = levels * mx.exp(-math.log(10000.0) * mx.arange(FREQUENCIES) / FREQUENCIES)
            self._noise_levels = mx.concatenate([mx.sin(angles), mx.cos(angles)], axis=-1)
        self.mask_token = settings.token("mask_token_id", files.vocabulary)
        self.most = self.slots - self.skipped
        if self.most < 1:
            raise settings.wrong("block_size", "at least one token more")

    def open(self, count: int = 1) -> DrafterContext:
        return DFlashContext(self, count)

    def cache_nbytes(self, source: int, positions: int) -> int:
        return super().cache_nbytes(source, positions + self.slots)

    def embed_slots(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of the slots of a block, (batch, slots, width). PrismML's drafters
        add how noisy a slot is: the newest token is given, and the other slots are masked."""
        states = self.embed(tokens)
        if (level := self.get("log_snr_embed")) is None:
            return states
        return states + level.fc2(nn.silu(level.fc1(self._noise_levels.astype(states.dtype))))

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """Return the final logits of a slot over the target's vocabulary, and `carried` for the
        next slot. `logits` are the head's, (batch, 1, the drafter's vocabulary).
        `MarkovHead.latent` describes the other arguments."""
        if "markov_head" in self:
            latent, carried = self.markov_head.latent(token, state, carried)
            logits = logits + self.markov_head.markov_w2(latent)
        return self.over_target(logits), carried

    def confidence(self, state: mx.array, before: mx.array | None) -> mx.array:
        """Return (...) float32. Its sigmoid is the probability that the target accepts the token of
        a slot if it accepts all tokens before it.

        Args:
            state: The states of slots, (..., width).
            before: The Markov head's embeddings of the tokens before the slots, (..., rank). Only
                some files feed them to the confidence head.
        """
        inputs = [state, before] if self._is_told_token and before is not None else [state]
        return self.confidence_head.proj(mx.concatenate(inputs, axis=-1)).astype(mx.float32)[..., 0]

    def features(self, hidden: mx.array) -> mx.array:
        return self.hidden_norm(self.fc(hidden.astype(self.dtype)))

    def masks(self, place: Place) -> list[mx.array | None]:
        """Return each layer's attention mask for the blocks that are written at `place`, (batch or
        1, 1, slots or 1, end) bool; None if a layer hides nothing. A block sees the earlier
        positions of its own row, and its own slots."""
        starts = mx.array(place.starts[:1] if place.even else place.starts)[:, None, None, None]
        columns, rows = mx.arange(place.end), starts + mx.arange(self.slots)[:, None]
        visible = None if place.even else columns < starts + self.slots
        masks: list[mx.array | None] = []
        for window, causal in self.sight:
            parts = [] if visible is None else [visible]
            if window is not None and self.window_behind_block:
                parts.append(columns >= starts - window)
            elif window is not None:
                parts.append(rows - columns < window)
            if causal:
                parts.append(columns <= rows)
            masks.append(reduce(and_, parts) if parts else None)
        return masks


class DFlashContext(DrafterContext):
    """The rows of a group in a DFlash: keys and values of the target's hidden states."""

    _network: DFlash

    def _process(self, hidden: mx.array, following: Sequence[Sequence[int]]) -> None:
        self._advance(following)
        states = self._network.features(hidden)
        for layer, cache in zip(self._network.layers, self._caches, strict=True):
            cache.append(*layer.self_attn.keys_values(states, self._rows.place.offset))

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        self._process(hidden, following)
        network, skipped = self._network, self._network.skipped
        newest = mx.array([tokens[-1:] for tokens in following])
        masked = mx.full((len(following), network.slots - 1), network.mask_token, dtype=mx.int32)
        tokens = mx.concatenate([newest, masked], axis=1)
        states = network.embed_slots(tokens)
        place = self._rows.advance(tokens, network.slots)
        parts = zip(network.layers, self._caches, network.masks(place), self._sources, strict=True)
        for layer, cache, mask, source in parts:
            attend = partial(attend_cached, cache, mask, layer.self_attn, offset=place.offset)
            states = layer(states, attend, source)
        states = network.norm(states)
        self._logits = network.own_logits(states[:, skipped : skipped + count])
        self._states, self._carried, self._index = states, None, -1
        self._chances: list[mx.array] = []
        if skipped and "markov_head" in network:
            _, self._carried = network.markov_head.latent(newest, states[:, :1], None)
        return self.next_logits(newest)

    def next_logits(self, tokens: mx.array) -> mx.array:
        network = self._network
        self._index += 1
        slot = network.skipped + self._index
        state = self._states[:, slot : slot + 1]
        if "confidence_head" in network:
            before = network.markov_head.markov_w1(tokens) if "markov_head" in network else None
            self._chances.append(mx.sigmoid(network.confidence(state, before)))
        logits, self._carried = network.slot_logits(
            self._logits[:, self._index : self._index + 1], tokens, state, self._carried
        )
        return logits

    def chances(self) -> mx.array | None:
        return mx.concatenate(self._chances, axis=1) if self._chances else None


class DSpark(DFlash):
    """The network of a DSpark."""

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        return bool(nested(config).get("markov_rank")) or is_named(config, r"\w*DSpark\w*")


class Convolution(nn.Module):
    """Two causal convolutions over the slots of a block. They wrap a part of a layer (attention or
    feed-forward): one runs over its inputs and one over its outputs. Each slot's kernel is a
    learned base kernel plus a projection of the slot's input. A group of adjacent entries of a
    state shares one projected kernel."""

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__()
        reach, width = int(files.settings.get("conv_kernel_size", 2)), files.sizes.width
        self._groups = width // int(files.settings.get("conv_group_size", 16))
        self.base_kernel = mx.zeros((2, reach, width))
        self.kernel_projection = nn.Linear(width, 2 * reach * self._groups, bias=False)

    def __call__(self, part: Callable[[mx.array], mx.array], states: mx.array) -> mx.array:
        """Return the output of a part of a layer for states, (batch, slots, width)."""
        added = self.kernel_projection(states)
        added = added.reshape(*states.shape[:2], 2, -1, self._groups)
        inner = part(self._convolved(states, 0, added[:, :, 0]))
        return self._convolved(inner, 1, added[:, :, 1])

    def _convolved(self, states: mx.array, which: int, added: mx.array) -> mx.array:
        slots, width = states.shape[1:]
        kernels = mx.repeat(added, width // self._groups, axis=-1) + self.base_kernel[which]
        result: Any = 0
        for back in range(kernels.shape[2]):
            shifted = mx.pad(states, [(0, 0), (back, 0), (0, 0)])[:, :slots]
            result = result + shifted * kernels[:, :, back]
        return result


class ConvolvedLayer(DrafterLayer):
    """A layer with convolutions around its attention and its feed-forward network."""

    def __init__(self, files: DrafterFiles, number: int) -> None:
        super().__init__(files, number)
        self.attention_conv, self.mlp_conv = Convolution(files), Convolution(files)

    def __call__(
        self, states: mx.array, attend: Callable[[mx.array], mx.array], source: Source = None
    ) -> mx.array:
        states = states + self.attention_conv(attend, self.input_layernorm(states))
        states = self.look_at(source, states)
        return states + self.mlp_conv(self.mlp, self.post_attention_layernorm(states))


class DFlash2(DFlash):
    """The network of a DFlash 2. Its selector adds a bonus to the logits of a slot's likeliest
    tokens, and gives -inf to the others. The bonus depends on the token before the slot and on the
    slot's state."""

    layer_class = ConvolvedLayer

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        return is_named(config, ".*DFlash2.*") or bool(nested(config).get("selector_rank"))

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        vocabulary, rank = files.vocabulary, int(files.settings.get("selector_rank", 256))
        self._top_k = int(files.settings.get("selector_top_k", 16))
        self.candidate_selector = nn.Module()
        self.candidate_selector.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.candidate_selector.successor_codebook = nn.Embedding(vocabulary, rank)
        projection = nn.Linear(files.sizes.width, rank, bias=False)
        self.candidate_selector.hidden_projection = projection

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        selector, likeliest = self.candidate_selector, indices_of_largest(logits, self._top_k)
        wanted = selector.predecessor_codebook(token) * selector.hidden_projection(state)
        bonus = (selector.successor_codebook(likeliest) @ wanted[..., None])[..., 0]
        scores = mx.take_along_axis(logits, likeliest, axis=-1) + bonus.astype(logits.dtype)
        nothing = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(nothing, likeliest, scores, axis=-1), None
