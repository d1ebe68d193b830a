"""DSpark's heads: what the token before adds to the logits of the next, and how sure it is.

Source: arXiv 2607.05147. Of Markov heads vanilla looks at that token alone, gated at the slot's
hidden state too, rnn at what it carries through the block as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import CheckpointError
from ..base import Base
from ..kv_cache import KVCache
from .files import SpeculatorFiles, StoredTensors
from .layers import Attention, Layer, Source
from .network import Reading, Speculator
from .sizes import LayerSizes, Settings, Shapes, described, is_named, nested


class MarkovHead(nn.Module):
    """The head of a directory; named as in files."""

    def __init__(self, files: BlockFiles) -> None:
        super().__init__()
        self._kind = files.markov
        width, (vocabulary, rank) = files.sizes.width, files.tensors.shapes[W1]
        drafted = files.tensors.shapes["markov_head.markov_w2.weight"][0]
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if files.markov == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if files.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def step(
        self, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """(1, 1) int32, the token before a slot, and the slot's (1, 1, width) -> what is added to
        its logits (1, 1, the drafter's vocabulary), and what the next slot is given as `carried`.
        """
        before, carried = self.latent(token, state, carried)
        return self.markov_w2(before), carried

    def latent(
        self, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The same before the last matrix, of width `rank`; of many blocks at once."""
        before = self.markov_w1(token)
        if self._kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([state, before], axis=-1)))
            before = gate * before
        if self._kind == "rnn":
            memory = mx.zeros_like(before) if carried is None else carried
            joint = self.joint_proj(mx.concatenate([memory, before, state], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            carried = gate * memory + (1 - gate) * mx.tanh(candidate)
            before = mx.tanh(output)
        return before, carried


class ConfidenceHead(nn.Module):
    """How likely the target is to take what a slot drafts, if it takes all before; named as in
    files. It may look at the token before, in the Markov head's embedding."""

    def __init__(self, files: BlockFiles) -> None:
        super().__init__()
        inputs = files.tensors.shapes[CONFIDENCE][1]
        self.proj = nn.Linear(inputs, 1, bias=CONFIDENCE_BIAS in files.tensors)
        self._alone = inputs == files.sizes.width

    def logits(self, state: mx.array, before: mx.array | None) -> mx.array:
        """(..., width) of slots, and the embeddings (..., rank) of the tokens before -> (...)
        float32, of which the sigmoid is the chance."""
        told = [state] if self._alone or before is None else [state, before]
        logits: mx.array = self.proj(mx.concatenate(told, axis=-1))
        return logits.astype(mx.float32)[..., 0]


ARCHITECTURES: Mapping[str, str] = {
    "dspark": r"\w*DSpark\w*",
    "dflash": r"\w*DFlash\w*",
}
IDS = "aux_hidden_state_layer_ids"
MoreShapes = Callable[[Settings, LayerSizes, int], Shapes]
USUAL_TAPS = 5
MOST_SLOTS = 256
MARKOV = ("vanilla", "gated", "rnn")
CONFIDENCE = "confidence_head.proj.weight"
CONFIDENCE_BIAS = "confidence_head.proj.bias"
W1 = "markov_head.markov_w1.weight"


@dataclass(frozen=True)
class BlockFiles(SpeculatorFiles):
    """slots: of one block, the newest token's included. skipped: how many of them say nothing.
    mask_token: what stands in a slot that is to be filled. windows: per layer how many positions it
    looks back, None without end. window_behind_block: that is counted from the block's first slot,
    and not from each. causal: per layer whether a slot sees those before it alone.
    markov: the kind of head that looks at the token before, or None.
    """

    sizes: LayerSizes
    slots: int
    skipped: int
    mask_token: int
    windows: tuple[int | None, ...]
    window_behind_block: bool
    causal: tuple[bool, ...]
    markov: str | None

    def usual_layers(self, layers: int) -> tuple[int, ...]:
        """From the second layer to the third from the end, evenly."""
        if self.taps == 1:
            return (layers // 2,)
        return tuple(round(1 + at * (layers - 4) / (self.taps - 1)) for at in range(self.taps))


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a drafter of the kind, DSpark or DFlash 1."""
    telling = nested(config).get("markov_rank")
    if kind == "dflash":
        telling = isinstance(config.get("dflash_config"), Mapping)
    return bool(telling) or is_named(config, ARCHITECTURES[kind])


def read(
    kind: str, directory: Path, config: Mapping[str, Any], more: MoreShapes | None = None
) -> BlockFiles:
    """See `speculators.read`. more: tensors that a kind has beside those of DFlash 1."""
    settings, sizes, layered = described(directory, config, config.get("dflash_config"))
    if config.get("model_type") not in (None, "qwen3", "llama", "speculator_model") and not layered:
        raise settings.wrong("model_type", "qwen3")
    vocabulary = settings.whole("vocab_size", 151936 if layered else None)
    drafted = settings.whole("draft_vocab_size", vocabulary)
    stored = StoredTensors.of(directory, _own_name, _passed_over(drafted, vocabulary))
    stored.check_layers(sizes.count)
    taps = _taps(stored, settings.whole("target_hidden_size", sizes.width))
    markov = _markov(settings, stored)
    rank = stored.shapes[W1][-1] if markov is not None and stored.shapes[W1] else 0
    needed, optional = _shapes(sizes, taps, (vocabulary, drafted), markov, rank)
    needed |= _confidence(stored, sizes.width, rank)
    stored.check(needed | (more(settings, sizes, vocabulary) if more else {}), optional)
    anchored = settings.flag("sample_from_anchor", kind == "dspark")
    least = 1 if anchored else 2
    slots = settings.whole("block_size", 8 if layered else None, least, MOST_SLOTS)
    mask_token = settings.whole("mask_token_id", least=0)
    if mask_token >= vocabulary:
        raise settings.wrong("mask_token_id", f"one of the target's {vocabulary} tokens")
    windows = _windows(settings, sizes.count)
    return BlockFiles(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=_tapped(settings),
        taps=taps,
        target_width=sizes.width,
        vocabulary=vocabulary,
        target_ids=stored.target_ids(drafted, vocabulary),
        tensors=stored,
        slots=slots,
        skipped=0 if anchored else 1,
        mask_token=mask_token,
        windows=windows,
        window_behind_block=layered,
        causal=_causal(settings, windows, kind),
        markov=markov,
    )


def expected(
    kind: str, directory: Path, config: Mapping[str, Any], more: MoreShapes | None = None
) -> Shapes:
    """The tensors of such a drafter, as far as config.json tells. more: as in `read`."""
    settings, sizes, layered = described(directory, config, config.get("dflash_config"))
    vocabulary = settings.whole("vocab_size", 151936 if layered else None)
    vocabularies = vocabulary, settings.whole("draft_vocab_size", vocabulary)
    rank = settings.whole("markov_rank", 0, least=0)
    markov = _markov_kind(settings) if rank else None
    taps = len(_tapped(settings) or (0,) * USUAL_TAPS)
    needed, _ = _shapes(sizes, taps, vocabularies, markov, rank)
    return needed | (more(settings, sizes, vocabulary) if more else {})


def _own_name(name: str) -> str:
    # A codebook may be stored as a plain parameter.
    return re.sub(r"_codebook$", "_codebook.weight", name.removeprefix("model."))


def _tapped(settings: Settings) -> tuple[int, ...] | None:
    """The layers whose outputs are read. `speculators` names layers by their inputs, the others by
    their outputs."""
    if (by_input := settings.ids(IDS)) is not None:
        return tuple(layer - 1 for layer in by_input)
    return settings.ids("target_layer_ids")


def _taps(stored: StoredTensors, target_width: int) -> int:
    shape = stored.shapes.get("fc.weight", ())
    if len(shape) != 2:
        raise CheckpointError(f"{stored.directory} has no matrix fc.weight: it is not complete")
    return max(1, shape[1] // target_width)


def _passed_over(drafted: int, vocabulary: int) -> tuple[str, ...]:
    """What some files hold that is the target's own, since training freezes it."""
    own_head = () if drafted != vocabulary else ("lm_head.weight",)
    return ("embed_tokens.weight", *own_head)


def _markov(settings: Settings, stored: StoredTensors) -> str | None:
    """The kind of Markov head; None where there is none."""
    if W1 not in stored.shapes:
        if settings.whole("markov_rank", 0, least=0):
            raise CheckpointError(f"{stored.directory} lacks {W1}, which config.json asks for")
        return None
    return _markov_kind(settings)


def _markov_kind(settings: Settings) -> str:
    kind = settings.get("markov_head_type") or "vanilla"
    if kind not in MARKOV:
        raise settings.wrong("markov_head_type", " or ".join(MARKOV))
    return str(kind)


def _windows(settings: Settings, layers: int) -> tuple[int | None, ...]:
    kinds = settings.get("layer_types") or ["full_attention"] * layers
    known = ("full_attention", "sliding_attention")
    listed = isinstance(kinds, list) and all(kind in known for kind in kinds)
    if not listed or len(kinds) != layers:
        raise settings.wrong("layer_types", "full_attention or sliding_attention for each layer")
    if "sliding_attention" not in kinds:
        return (None,) * layers
    window = settings.whole("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(settings: Settings, windows: tuple[int | None, ...], kind: str) -> tuple[bool, ...]:
    """Where nothing says so, slots of layers with a window see those before them alone; those of
    DFlash 2 as `speculators` has it see all."""
    if settings.get("is_causal") is not None:
        return (settings.flag("is_causal", False),) * len(windows)
    seeing = kind == "dflash2" and settings.get("speculators_model_type") is not None
    sliding = not settings.flag("sliding_window_non_causal", seeing)
    return tuple(window is not None and sliding for window in windows)


def _shapes(
    sizes: LayerSizes, taps: int, vocabularies: tuple[int, int], markov: str | None, rank: int
) -> tuple[Shapes, Shapes]:
    """What there has to be, and what there may be."""
    width, (vocabulary, drafted) = sizes.width, vocabularies
    needed: Shapes = {
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
        **sizes.before_layers(),
    }
    optional: Shapes = {"fc.bias": (width,)}
    own = {"d2t": (drafted,)}
    if drafted != vocabulary:
        needed |= {**own, "lm_head.weight": (drafted, width)}
    else:
        optional |= own
    for number in range(sizes.count):
        needed |= sizes.shapes(number, width)
        optional |= sizes.optional(number)
    if markov is not None:
        needed |= {W1: (vocabulary, rank), "markov_head.markov_w2.weight": (drafted, rank)}
    if markov == "gated":
        needed["markov_head.gate_proj.weight"] = (rank, width + rank)
        needed["markov_head.gate_proj.bias"] = (rank,)
    if markov == "rnn":
        needed["markov_head.joint_proj.weight"] = (3 * rank, 2 * rank + width)
        needed["markov_head.joint_proj.bias"] = (3 * rank,)
    return needed, optional


def _confidence(stored: StoredTensors, width: int, rank: int) -> Shapes:
    """Of the confidence head, if there is one; it may look at the token before a slot as well."""
    if CONFIDENCE not in stored.shapes:
        return {}
    alone = stored.shapes[CONFIDENCE] == (1, width)
    needed: Shapes = {CONFIDENCE: (1, width if alone else width + rank)}
    return needed | ({CONFIDENCE_BIAS: (1,)} if CONFIDENCE_BIAS in stored.shapes else {})


Attend = Callable[[mx.array], mx.array]


class DFlash(Speculator):
    """The network of a directory, DSpark's with its Markov head."""

    def __init__(self, files: BlockFiles, target: Base) -> None:
        super().__init__(files, target)
        sizes = files.sizes
        self.hidden_norm = nn.RMSNorm(sizes.width, sizes.eps)
        self.layers = [self.layer(files, number) for number in range(sizes.count)]
        if files.markov is not None:
            self.markov_head = MarkovHead(files)
        if CONFIDENCE in files.tensors:
            self.confidence_head = ConfidenceHead(files)
        self._window_behind_block = files.window_behind_block
        self._sight = tuple(zip(files.windows, files.causal, strict=True))
        self.slots, self.skipped, self.mask_token = files.slots, files.skipped, files.mask_token

    @property
    def most(self) -> int:
        """How many tokens a block drafts."""
        return self.slots - self.skipped

    def open(self) -> DFlashReading:
        """A sequence of which nothing was read."""
        return DFlashReading(self)

    def layer(self, files: BlockFiles, number: int) -> Layer:
        """One of its layers."""
        return Layer(files.sizes, number, files.sizes.width, files.tensors)

    def through(
        self, layer: Layer, states: mx.array, attend: Attend, source: Source | None = None
    ) -> mx.array:
        """What a layer makes of (1, slots, width). attend: its attention. source: see `sources`."""
        return layer.finish(states, attend(layer.input_layernorm(states)), source)

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """From the head's (1, 1, the drafter's vocabulary) for a slot to logits over the target's.

        token: (1, 1) int32, the one before. state: (1, 1, width), what the head was given. carried:
        what the slot before returned as such."""
        if "markov_head" in self:
            bias, carried = self.markov_head.step(token, state, carried)
            logits = logits + bias
        return self.over_target(logits), carried

    def chance(self, token: mx.array, state: mx.array) -> mx.array:
        """How likely what a slot drafts is to stay if all before it does, (1, 1) float32. token,
        state: as in `slot_logits`."""
        before = self.markov_head.markov_w1(token) if "markov_head" in self else None
        return mx.sigmoid(self.confidence_head.logits(state, before))

    def context(self, hidden: mx.array) -> mx.array:
        """(1, m, taps x target's width) -> (1, m, width), of which layers make keys and values."""
        states: mx.array = self.hidden_norm(self.fc(hidden.astype(self.dtype)))
        return states

    def masks(self, before: int) -> list[mx.array | None]:
        """Per layer what each slot of a block behind `before` rows may look at."""
        columns = mx.arange(before + self.slots)
        rows = columns[before:, None]
        masks: list[mx.array | None] = []
        for window, causal in self._sight:
            mask = None
            if window is not None and self._window_behind_block:
                mask = columns[None] >= before - window
            elif window is not None:
                mask = rows - columns < window
            if causal:
                mask = columns <= rows if mask is None else mask & (columns <= rows)
            masks.append(mask)
        return masks


class DFlashReading(Reading):
    """One sequence: keys and values of the target's hidden states; those of blocks are dropped."""

    def __init__(self, network: DFlash) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._newest: mx.array | None = None
        self._states: mx.array | None = None
        self._logits: mx.array | None = None
        self._carried: mx.array | None = None
        self._chances: list[mx.array] = []
        self._index = 0

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As Reading says."""
        offset = self._rows.advance(following, 0).starts[0]
        context = self._network.context(hidden)
        for layer, cache in zip(self._network.layers, self._caches, strict=True):
            cache.append(*layer.self_attn.keys_values(context, offset))
        self._newest = following[:, -1:]

    def guess(self, count: int) -> mx.array:
        """As Reading says."""
        assert self._newest is not None, "something was read"
        skipped = self._network.skipped
        states = self._block(self._newest)
        self._logits = self._network.own_logits(states[:, skipped : skipped + count])
        self._states, self._carried, self._index = states, None, -1
        self._chances = []
        if skipped and "markov_head" in self._network:
            head = self._network.markov_head
            _, self._carried = head.step(self._newest, states[:, :1], None)
        return self.guess_after(self._newest)

    def guess_after(self, token: mx.array) -> mx.array:
        """As Reading says."""
        network = self._network
        assert self._logits is not None and self._states is not None, "a block was begun"
        self._index += 1
        slot = network.skipped + self._index
        state = self._states[:, slot : slot + 1]
        if "confidence_head" in network:
            self._chances.append(network.chance(token, state))
        logits, self._carried = network.slot_logits(
            self._logits[:, self._index : self._index + 1], token, state, self._carried
        )
        return logits

    def chances(self) -> mx.array | None:
        """As Reading says."""
        return mx.concatenate(self._chances, axis=1) if self._chances else None

    def _block(self, newest: mx.array) -> mx.array:
        """What the last norm puts out for all slots, (1, slots, width)."""
        network = self._network
        masked = mx.full((1, network.slots - 1), network.mask_token, dtype=mx.int32)
        tokens = mx.concatenate([newest, masked], axis=1)
        states = network.embed(tokens)
        offset = self._rows.advance(tokens, network.slots).starts[0]
        parts = zip(network.layers, self._caches, network.masks(offset), self._sources, strict=True)
        for layer, cache, mask, source in parts:
            attend = partial(_attend, layer.self_attn, cache, offset, mask)
            states = network.through(layer, states, attend, source)
        normed: mx.array = network.norm(states)
        return normed


def _attend(
    attention: Attention, cache: KVCache, offset: int, mask: mx.array | None, rows: mx.array
) -> mx.array:
    queries = attention.queries(rows, offset)
    keys, values = cache.append(*attention.keys_values(rows, offset))
    return attention.attend(queries, keys, values, mask)


network = DFlash
