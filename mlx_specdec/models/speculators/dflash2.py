"""DFlash 2: what it adds to DFlash 1.

Source: z-lab/dflash (the candidate selector and the grouped convolutions of its second version).
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.speculators.dflash import BlockFiles
from ...checkpoints.speculators.dflash2 import DFlash2Files
from ..base import Base
from .dflash import Attend, DFlash
from .layers import Layer, Source


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
