"""Division of linear layers between the ranks of a group. Each rank computes a part of the outputs
of a first layer, which are its part of the inputs of a second layer. The outputs of the second
layer are added up over all ranks (Shoeybi et al., arXiv 1909.08053). This module divides weights
and computes no pass."""

import math
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear

from ...errors import OptionError

SMALLEST_GROUP = 32
"""Smallest group of MLX's quantization "affine": the number of weights that share a scale."""


def check_even(parts: Mapping[str, int], ranks: int) -> None:
    """Raise OptionError if the parts of a model cannot be divided equally between ranks. `parts`
    maps the plural name of a part, for the message, to the number of such parts."""
    uneven = [f"{count} {what}" for what, count in parts.items() if count % ranks]
    if not uneven:
        return
    most = math.gcd(*parts.values())
    fit = [str(count) for count in range(2, most + 1) if most % count == 0]
    remedy = f"take {' or '.join(fit)} ranks" if fit else "take one machine"
    raise OptionError(f"{ranks} ranks cannot have equal parts of {' and '.join(uneven)}: {remedy}")


def shard_inputs(layer: nn.Module, group: mx.distributed.Group) -> nn.Module:
    """Return a linear layer over this rank's part of the inputs, whose outputs are added up over
    all ranks. Raises OptionError if quantization groups would have to be split between ranks."""
    if not whole_groups(layer, group.size()):
        raise OptionError(
            f"{group.size()} ranks cannot have equal parts of {_inputs(layer)} columns that are "
            f"quantized in groups of {layer.group_size}: take fewer ranks, or weights that are not "
            "quantized"
        )
    return shard_linear(layer, "sharded-to-all", group=group)


def whole_groups(layer: nn.Module, ranks: int) -> bool:
    """Split the quantization groups of a layer until every rank's inputs consist of whole groups,
    and return whether that is possible. The values of the weights do not change."""
    if "scales" not in layer or isinstance(layer, nn.QuantizedEmbedding):
        return True
    inputs, size = _inputs(layer), layer.group_size
    while inputs % (ranks * size) and layer.mode == "affine" and size > SMALLEST_GROUP:
        size //= 2
    if inputs % (ranks * size):
        return False
    parts = layer.group_size // size
    if parts > 1:
        layer.scales = mx.repeat(layer.scales, parts, axis=-1)
        layer.biases = mx.repeat(layer.biases, parts, axis=-1)
        layer.group_size = size
    return True


def _inputs(layer: nn.Module) -> int:
    return int(layer.scales.shape[-1] * layer.group_size)


def of_rank_0(group: mx.distributed.Group | None, value: bool) -> bool:
    """Return rank 0's value on every rank, so that all ranks decide alike even if they round
    differently."""
    if group is None:
        return value
    part = mx.full((group.size(),), int(value and group.rank() == 0))
    return bool(mx.distributed.all_sum(part, group=group)[0].item())
