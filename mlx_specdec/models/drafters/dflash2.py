"""DFlash 2: a DFlash with short convolutions around the attention and the feed-forward part of each
layer, and a selector that scores each slot's likeliest tokens again. Source: z-lab/dflash, and the
files of `speculators`."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.files import Weights
from ...largest import indices_of_largest
from . import dflash
from .dflash import IDS, Attend, DFlash
from .files import DrafterFiles, is_named, nested
from .layers import DrafterLayer, SourceKeysValues
from .network import Config, DrafterKind


def recognizes(config: Config, names: Collection[str]) -> bool:
    return is_named(config, ".*DFlash2.*") or bool(nested(config).get("selector_rank"))


def read(directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
    files = dflash.read("dflash2", directory, config, weights)
    if files.target_ids is not None:
        raise files.settings.wrong("draft_vocab_size", "the target's whole vocabulary")
    return files


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

    def before(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """Return the inputs of the part, and the kernels for `behind`, from (1, slots, width)."""
        added = self.kernel_projection(states)
        added = added.reshape(*states.shape[:2], 2, -1, self._groups)
        return self._convolved(states, 0, added[:, :, 0]), added[:, :, 1]

    def behind(self, states: mx.array, kernels: mx.array) -> mx.array:
        """Return the convolved output of the part, which is added to the residual."""
        return self._convolved(states, 1, kernels)

    def _convolved(self, states: mx.array, which: int, added: mx.array) -> mx.array:
        slots, width = states.shape[1:]
        kernels = mx.repeat(added, width // self._groups, axis=-1) + self.base_kernel[which]
        result: Any = 0
        for back in range(kernels.shape[2]):
            shifted = mx.pad(states, [(0, 0), (back, 0), (0, 0)])[:, :slots]
            result = result + shifted * kernels[:, :, back]
        return result


class Selector(nn.Module):
    """The module that adds a bonus to the logits of a slot's likeliest tokens. The bonus depends on
    the token before the slot and on the slot's state."""

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__()
        self._top_k = int(files.settings.get("selector_top_k", 16))
        vocabulary, rank = files.vocabulary, int(files.settings.get("selector_rank", 256))
        self.predecessor_codebook = nn.Embedding(vocabulary, rank)
        self.successor_codebook = nn.Embedding(vocabulary, rank)
        self.hidden_projection = nn.Linear(files.sizes.width, rank, bias=False)

    def step(self, logits: mx.array, token: mx.array, state: mx.array) -> mx.array:
        """Return new logits, (1, 1, vocabulary), which are -inf except for the likeliest tokens.

        Args:
            logits: The head's logits of the slot, (1, 1, vocabulary).
            token: The token before the slot, (1, 1) int32.
            state: The slot's state, (1, 1, width).
        """
        likeliest = indices_of_largest(logits, self._top_k)
        wanted = self.predecessor_codebook(token) * self.hidden_projection(state)
        bonus = (self.successor_codebook(likeliest) @ wanted[..., None])[..., 0]
        scores = mx.take_along_axis(logits, likeliest, axis=-1) + bonus.astype(logits.dtype)
        nothing = mx.full(logits.shape, -mx.inf, dtype=logits.dtype)
        return mx.put_along_axis(nothing, likeliest, scores, axis=-1)


class DFlash2(DFlash):
    """The network of a DFlash 2."""

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        self.candidate_selector = Selector(files)
        for layer in self.layers:
            layer.attention_conv, layer.mlp_conv = Convolution(files), Convolution(files)

    def through(
        self,
        layer: DrafterLayer,
        states: mx.array,
        attend: Attend,
        source: SourceKeysValues | None = None,
    ) -> mx.array:
        rows, kernels = layer.attention_conv.before(layer.input_layernorm(states))
        states = states + layer.attention_conv.behind(attend(rows), kernels)
        states = layer.look_at(source, states)
        rows, kernels = layer.mlp_conv.before(layer.post_attention_layernorm(states))
        return states + layer.mlp_conv.behind(layer.mlp(rows), kernels)

    def slot_logits(
        self, logits: mx.array, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        return self.candidate_selector.step(logits, token, state), None


DFLASH2 = DrafterKind("dflash2", recognizes, read, DFlash2, layer_ids=IDS)
