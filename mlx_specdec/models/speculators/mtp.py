"""Multi-token prediction: a layer of the target's own family sees each token's embedding beside the
hidden state before it; its own output is fed back to draft on.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. Both the target's hidden state and what is fed
back are as the last norm leaves them, which is what transformers does for all of these families.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config

from ...checkpoints.configuration import check_weights
from ...checkpoints.plans.mlx_lm import cannot_build
from ...checkpoints.speculators.layout import SpeculatorFiles
from ...checkpoints.speculators.mtp import LAYER, MtpFiles
from ...checkpoints.speculators.stored import IN_16_BITS
from ...errors import CheckpointError
from ..base import Base
from ..decoder_context import BatchedCache
from ..decoder_loading import in_asked_numbers
from ..decoder_outline import network_of, own_randomness
from ..number_format import NumberFormat
from .chain import Chain, ChainReading
from .layers import Source


class Given(nn.Module):
    """Takes the place of what a model has around its layers."""

    def __call__(self, states: mx.array) -> mx.array:
        """What it is given."""
        return states


class Mtp(Chain):
    """The layer of a checkpoint, which mlx-lm computes as a model of one layer without embedding,
    norm and head."""

    def __init__(self, files: MtpFiles, target: Base) -> None:
        super().__init__(files, target)
        self.pre_fc_norm_embedding = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        with own_randomness():
            whole: Any = network_of(files.block, str(files.directory))
        self._renamed = whole.sanitize
        self._own_bits = getattr(whole, "quant_predicate", None) or (lambda path, module: True)
        self._casts = getattr(whole, "cast_predicate", lambda path: True)
        self.block = whole.model
        self.block.embed_tokens = self.block.norm = Given()

    def open(self) -> ChainReading:
        """A sequence of which nothing was read."""
        return ChainReading(self, 1, BatchedCache)

    def step(
        self,
        tokens: mx.array,
        states: mx.array,
        caches: list[Any],
        offset: int,
        sources: Sequence[Source | None] = (),
    ) -> tuple[mx.array, mx.array]:
        """As Chain says; no source is attended to."""
        embedded = self.pre_fc_norm_embedding(self.embed(tokens))
        both = mx.concatenate([embedded, self.pre_fc_norm_hidden(states)], axis=-1)
        normed = self.norm(self.block(self.fc(both), cache=caches))
        return normed, normed

    def load(self, files: SpeculatorFiles, numbers: NumberFormat) -> None:
        """As Speculator says. Matrices may be stored as MLX quantizes them."""
        assert isinstance(files, MtpFiles)
        try:
            weights = self._as_mlx_lm(files)
            nn.quantize(self, class_predicate=partial(_stored_bits, weights))
            shapes = {name: array.shape for name, array in tree_flatten(self.parameters())}
            check_weights(shapes, {name: array.shape for name, array in weights.items()})
            self.load_weights(list(weights.items()))
            # Building a pass shows what config.json has that cannot be run.
            width = files.sizes.width
            self.open().read(mx.zeros((1, 2, width)), mx.zeros((1, 2), dtype=mx.int32))
        except CheckpointError as problem:
            raise CheckpointError(f"{files.directory}: {problem}") from None
        except Exception as problem:  # mlx-lm's classes check nothing: whatever fails first tells
            raise CheckpointError(f"{files.directory}: {cannot_build(problem)}") from problem
        in_asked_numbers(self, str(files.directory), numbers)
        mx.eval(self.parameters())

    def quant_predicate(self, path: str, module: nn.Module) -> Any:
        """What fewer bits are taken for, and how many; as mlx-lm's models have it."""
        return path not in IN_16_BITS and self._own_bits(path, module)

    def cast_predicate(self, path: str) -> bool:
        """What may be cast to another type; as mlx-lm's models have it."""
        return bool(self._casts(path))

    def _as_mlx_lm(self, files: MtpFiles) -> dict[str, mx.array]:
        """The tensors under this network's names; the layer's are joined, split and named as mlx-lm
        does with the first layer of a model."""
        weights = {name: files.tensors[name] for name in files.tensors if LAYER not in name}
        layer = {f"model.{name}": files.tensors[name] for name in files.tensors if LAYER in name}
        renamed = layer if files.renamed else self._renamed(layer)
        return weights | {
            name.replace("model.", "block.", 1): array for name, array in renamed.items()
        }


def _stored_bits(weights: dict[str, mx.array], path: str, module: nn.Module) -> Any:
    able = hasattr(module, "to_quantized") and f"{path}.scales" in weights
    return able and infer_quant_config(path, module, weights)


network = Mtp
