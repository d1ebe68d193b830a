"""Weights divided between the ranks of a group, so that each computes a part of every layer.

A layer whose outputs are divided is followed by one whose inputs are, and what the second one gives
is added up over all ranks (Shoeybi et al., arXiv 1909.08053). Nothing is computed here: weights
that were read lazily are read when the rank's part of them is wanted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers.distributed import shard_inplace, shard_linear
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...errors import OptionError, first_line
from .loader import classes

SMALLEST_GROUP = 32
"""Weights that have a scale and a bias of their own, of MLX's quantization "affine"."""


def check_even(parts: Mapping[str, int], ranks: int) -> None:
    """Raises OptionError where ranks cannot have equally many of something.

    parts: what is divided, in words, and how many there are.
    """
    uneven = [f"{count} {what}" for what, count in parts.items() if count % ranks]
    if not uneven:
        return
    most = math.gcd(*parts.values())
    fit = [str(count) for count in range(2, most + 1) if most % count == 0]
    remedy = f"take {' or '.join(fit)} ranks" if fit else "take one machine"
    raise OptionError(f"{ranks} ranks cannot have equal parts of {' and '.join(uneven)}: {remedy}")


def shard_outputs(layer: nn.Module, group: mx.distributed.Group) -> None:
    """A linear layer keeps this rank's part of its outputs."""
    shard_inplace(layer, "all-to-sharded", group=group)


def shard_inputs(layer: nn.Module, group: mx.distributed.Group) -> nn.Module:
    """A linear layer that is given this rank's part of its inputs, and adds up over all ranks.

    Raises OptionError where a rank would have a part of a group of quantized weights.
    """
    if not whole_groups(layer, group.size()):
        raise OptionError(
            f"{group.size()} ranks cannot have equal parts of {_inputs(layer)} columns that are "
            f"quantized in groups of {layer.group_size}: take fewer ranks, or weights that are not "
            "quantized"
        )
    return shard_linear(layer, "sharded-to-all", group=group)


def whole_groups(layer: nn.Module, ranks: int) -> bool:
    """Make the groups of a layer's quantized weights so small that every rank's inputs are whole
    groups, and say whether they are. The weights stay what they are: the parts of a group have its
    scale and its bias."""
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
    """Smaller groups wherever the ranks could not have whole ones otherwise, as `whole_groups` has
    it; for a network whose own `shard` then divides it. Its head is not divided."""
    for path, module in network.named_modules():
        if not path.endswith("lm_head"):
            whole_groups(module, ranks)


def _inputs(layer: nn.Module) -> int:
    """How many inputs a quantized layer has."""
    inputs: int = layer.scales.shape[-1] * layer.group_size
    return inputs


SHARES_KEYS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text")
"""Families that repeat keys and values where there are fewer of their heads than ranks."""
LATENT = ("kv_lora_rank", "q_lora_rank")
"""Of configurations whose keys and values are one array for all heads, which every rank has."""


def check(config: Mapping[str, Any], ranks: int, *, pipeline: bool) -> None:
    """Whether a model of this config.json can be divided, as far as that tells. Raises OptionError.

    ranks: how many."""
    model, _ = classes(config)
    kind = config["model_type"]
    if pipeline:
        return
    if not hasattr(model, "shard"):
        raise OptionError(
            f"mlx-lm cannot divide the layers of a model of type {kind}: try distributed pipeline, "
            "or one machine"
        )
    inner = config.get("text_config")
    told = inner if isinstance(inner, Mapping) else config
    heads = told.get("num_attention_heads")
    keys = told.get("num_key_value_heads") or heads
    shared = kind in SHARES_KEYS and isinstance(keys, int) and ranks % keys == 0
    latent = any(told.get(name) for name in LATENT)
    counts = {"attention heads": heads, "key-value heads": None if shared or latent else keys}
    whole = {what: count for what, count in counts.items() if isinstance(count, int)}
    check_even(whole, ranks)


def divide(network: nn.Module, group: mx.distributed.Group, *, pipeline: bool) -> None:
    """Keep this rank's part, lazily. Raises OptionError where a model cannot be divided so."""
    heads = _heads(network)
    if pipeline:
        _pipeline(network, group)
    else:
        _tensor(network, group)
    for holder, head in heads:
        # Rank 0 alone asks for logits: it has the whole head, and nobody has to gather them.
        holder.lm_head = NoHead(head) if group.rank() else head
        if getattr(holder, "sharding_group", None) is not None:
            holder.sharding_group = None


class NoHead(nn.Module):
    """In the place of an output head whose logits nobody asks for: it is not read from its file.
    Where ranks compare passes, what is compared are ones. head: whose shapes it gives."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.weight = mx.zeros((head.weight.shape[0], 0), dtype=head.weight.dtype)

    def __call__(self, states: mx.array) -> mx.array:
        shape = (*states.shape[:-1], self.weight.shape[0])
        return mx.broadcast_to(mx.ones((), dtype=states.dtype), shape)


def _heads(network: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    modules = (network, *network.modules())
    return [(each, each.lm_head) for each in modules if "lm_head" in each]


def _tensor(network: nn.Module, group: mx.distributed.Group) -> None:
    refine(network, group.size())
    try:
        network.shard(group)
    except (AssertionError, ValueError) as problem:
        raise OptionError(
            f"{group.size()} ranks cannot have equal parts of the model "
            f"({first_line(problem):.200}): take fewer, or weights that are not quantized"
        ) from None


def _pipeline(network: nn.Module, group: mx.distributed.Group) -> None:
    inner: Any = getattr(network, "model", None)
    kind = type(network).__module__.rpartition(".")[2]
    if not hasattr(inner, "pipeline"):
        raise OptionError(
            f"mlx-lm has no pipeline for models of type {kind}: try distributed tensor, or one "
            "machine"
        )
    if any(type(cache) is not KVCache for cache in make_prompt_cache(network)):
        raise OptionError(
            f"models of type {kind} remember more than keys and values, and cannot be a pipeline: "
            "try distributed tensor"
        )
    layers = len(inner.layers)
    if group.size() > layers:
        raise OptionError(
            f"{group.size()} ranks cannot share {layers} layers: take {layers} ranks or fewer"
        )
    inner.pipeline(group)


def of_rank_0(group: mx.distributed.Group | None, value: bool) -> bool:
    """What rank 0 has found: ranks that round differently decide alike."""
    if group is None:
        return value
    own = mx.full((group.size(),), int(value and group.rank() == 0))
    return bool(mx.distributed.all_sum(own, group=group)[0].item())
