"""A model of mlx-lm divided between ranks: a part of every layer, or in a pipeline some layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...errors import OptionError, first_line
from ..sharding import check_even, refine
from .loader import classes

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
