"""DFlash 2: DFlash 1 with short convolutions around each part of a layer, and a selector that walks
through each slot's likeliest tokens.

Source: z-lab/dflash, and the files that `speculators` writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..base import Base
from . import dflash
from .dflash import Attend, BlockFiles, DFlash
from .layers import Layer, Source
from .sizes import LayerSizes, Settings, Shapes, is_named, nested

SELECTOR, CONVOLUTIONS = "candidate_selector", ("attention_conv", "mlp_conv")
CODEBOOKS = tuple(f"{SELECTOR}.{part}_codebook.weight" for part in ("predecessor", "successor"))


@dataclass(frozen=True)
class DFlash2Files(BlockFiles):
    """reach: how many slots a convolution looks at. group_size: how many numbers of a state share
    what the state says of the convolution. top_k: how many tokens of a slot the selector weighs."""

    reach: int
    group_size: int
    top_k: int


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a DFlash 2."""
    return is_named(config, ".*DFlash2.*") or bool(nested(config).get("selector_rank"))


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> DFlash2Files:
    """See `speculators.read`."""
    block = dflash.read(kind, directory, config, _shapes)
    settings = Settings(directory / "config.json", config.get("dflash_config"), config)
    top_k = settings.whole("selector_top_k", 16)
    if block.target_ids is not None:
        raise settings.wrong("draft_vocab_size", "the target's whole vocabulary")
    if top_k > block.vocabulary:
        raise settings.wrong("selector_top_k", f"at most the {block.vocabulary} tokens there are")
    return DFlash2Files(
        **{each.name: getattr(block, each.name) for each in fields(block)},
        reach=settings.whole("conv_kernel_size", 2),
        group_size=settings.whole("conv_group_size", 16),
        top_k=top_k,
    )


def expected(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """As dflash has it."""
    return dflash.expected(kind, directory, config, _shapes)


def _shapes(settings: Settings, sizes: LayerSizes, vocabulary: int) -> Shapes:
    """What there has to be beside the tensors of DFlash 1."""
    reach, group = settings.whole("conv_kernel_size", 2), settings.whole("conv_group_size", 16)
    rank, width = settings.whole("selector_rank", 256), sizes.width
    if width % group:
        raise settings.wrong("conv_group_size", f"a divisor of the width {width}")
    shapes: Shapes = dict.fromkeys(CODEBOOKS, (vocabulary, rank))
    shapes[f"{SELECTOR}.hidden_projection.weight"] = (rank, width)
    for number in range(sizes.count):
        for part in CONVOLUTIONS:
            name = f"layers.{number}.{part}"
            shapes[f"{name}.base_kernel"] = (2, reach, width)
            shapes[f"{name}.kernel_projection.weight"] = (2 * reach * (width // group), width)
    return shapes


class Convolution(nn.Module):
    """Two convolutions over the slots of a block, one before a part of a layer and one behind it.

    A slot sees itself and those before it. What a state says of the kernels is added to them, in
    groups of numbers.
    """

    def __init__(self, files: DFlash2Files) -> None:
        super().__init__()
        width, self._groups = files.sizes.width, files.sizes.width // files.group_size
        self.base_kernel = mx.zeros((2, files.reach, width))
        self.kernel_projection = nn.Linear(width, 2 * files.reach * self._groups, bias=False)

    def before(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """(1, slots, width) -> what the part is given, and what `behind` is."""
        said = self.kernel_projection(states)
        said = said.reshape(*states.shape[:2], 2, -1, self._groups)
        return self._convolved(states, 0, said[:, :, 0]), said[:, :, 1]

    def behind(self, states: mx.array, said: mx.array) -> mx.array:
        """The part's result -> what is added to the states."""
        return self._convolved(states, 1, said)

    def _convolved(self, states: mx.array, which: int, said: mx.array) -> mx.array:
        slots, width = states.shape[1:]
        kernels = mx.repeat(said, width // self._groups, axis=-1) + self.base_kernel[which]
        result: Any = 0
        for back in range(kernels.shape[2]):
            shifted = mx.pad(states, [(0, 0), (back, 0), (0, 0)])[:, :slots]
            result = result + shifted * kernels[:, :, back]
        return result


class ConvolvedLayer(Layer):
    """One layer with its convolutions."""

    def __init__(self, files: DFlash2Files, number: int) -> None:
        super().__init__(files.sizes, number, files.sizes.width, files.tensors)
        self.attention_conv = Convolution(files)
        self.mlp_conv = Convolution(files)


class Selector(nn.Module):
    """Weighs the likeliest tokens of a slot by the token before, and by the slot's state."""

    def __init__(self, files: DFlash2Files) -> None:
        super().__init__()
        self._top_k = files.top_k
        vocabulary, rank = files.tensors.shapes["candidate_selector.successor_codebook.weight"]
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(files.sizes.width, rank, bias=False)

    def step(self, logits: mx.array, token: mx.array, state: mx.array) -> mx.array:
        """(1, 1, vocabulary) of the head -> the same of the likeliest tokens, weighed; others have
        -inf. token: (1, 1) int32, the one before."""
        likeliest = mx.argpartition(-logits, self._top_k - 1, axis=-1)[..., : self._top_k]
        wanted = self.predecessor_codebook(token) * self.hidden_projection(state)
        bonus = (self.successor_codebook(likeliest) @ wanted[..., None])[..., 0]
        scores = mx.take_along_axis(logits, likeliest, axis=-1) + bonus.astype(logits.dtype)
        nothing = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(nothing, likeliest, scores, axis=-1)


class DFlash2(DFlash):
    """The network of a directory."""

    def __init__(self, files: DFlash2Files, target: Base) -> None:
        super().__init__(files, target)
        self.candidate_selector = Selector(files)

    def layer(self, files: BlockFiles, number: int) -> Layer:
        """As DFlash says."""
        assert isinstance(files, DFlash2Files)
        return ConvolvedLayer(files, number)

    def through(
        self, layer: Layer, states: mx.array, attend: Attend, source: Source | None = None
    ) -> mx.array:
        """As DFlash says."""
        rows, said = layer.attention_conv.before(layer.input_layernorm(states))
        states = states + layer.attention_conv.behind(attend(rows), said)
        states = layer.look_at(source, states)
        rows, said = layer.mlp_conv.before(layer.post_attention_layernorm(states))
        return states + layer.mlp_conv.behind(layer.mlp(rows), said)

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """As DFlash says."""
        return self.candidate_selector.step(logits, token, state), None


network = DFlash2
