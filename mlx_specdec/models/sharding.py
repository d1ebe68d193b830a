"""Linear layers divided between the ranks of a group, so that each rank computes a part of them. A
layer whose outputs are divided is followed by one whose inputs are, and what the second one gives
is added up over all ranks (Shoeybi et al., arXiv 1909.08053). Nothing is computed here."""

import math
from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_linear

from ..errors import OptionError

SMALLEST_GROUP = 32
"""Weights that share a scale and a bias in MLX's quantization "affine"."""


def check_even(parts: Mapping[str, int], ranks: int) -> None:
    """Raise OptionError where ranks cannot have equally many. parts: how many there are of what."""
    uneven = [f"{count} {what}" for what, count in parts.items() if count % ranks]
    if not uneven:
        return
    most = math.gcd(*parts.values())
    fit = [str(count) for count in range(2, most + 1) if most % count == 0]
    remedy = f"take {' or '.join(fit)} ranks" if fit else "take one machine"
    raise OptionError(f"{ranks} ranks cannot have equal parts of {' and '.join(uneven)}: {remedy}")


def shard_inputs(layer: nn.Module, group: mx.distributed.Group) -> nn.Module:
    """Return a linear layer over this rank's part of the inputs that adds up over all ranks. Raises
    OptionError where a rank would have a part of a group of quantized weights."""
    if not whole_groups(layer, group.size()):
        raise OptionError(
            f"{group.size()} ranks cannot have equal parts of {_inputs(layer)} columns that are "
            f"quantized in groups of {layer.group_size}: take fewer ranks, or weights that are not "
            "quantized"
        )
    return shard_linear(layer, "sharded-to-all", group=group)


def whole_groups(layer: nn.Module, ranks: int) -> bool:
    """Make the groups of a layer's quantized weights so small that every rank's inputs are whole
    groups, and return whether they are. The weights do not change."""
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


def refine(network: nn.Module, ranks: int) -> None:
    """Call `whole_groups` for all layers but the head, which is not divided, of a network whose
    `shard` divides it then."""
    for path, module in network.named_modules():
        if not path.endswith("lm_head"):
            whole_groups(module, ranks)


def _inputs(layer: nn.Module) -> int:
    return int(layer.scales.shape[-1] * layer.group_size)


def of_rank_0(group: mx.distributed.Group | None, value: bool) -> bool:
    """Return the value of rank 0: ranks that round differently decide alike."""
    if group is None:
        return value
    part = mx.full((group.size(),), int(value and group.rank() == 0))
    return bool(mx.distributed.all_sum(part, group=group)[0].item())
