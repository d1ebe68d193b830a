"""Division of a decoder-only model of mlx-lm between ranks, by the model's own code."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ...checkpoints.files import text_config
from ...errors import OptionError, first_line
from ..base import family_of
from ..mlx_lm.loader import classes
from .sharding import check_even, refine

SHARES_KEYS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text")
"""Families that repeat key-value heads if there are fewer of them than ranks."""
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank")
"""Keys of config.json that show latent attention. There all heads share one array, which every rank
holds, so the number of key-value heads does not matter."""


def check_shares(config: Mapping[str, Any], ranks: int) -> None:
    """Raise OptionError if config.json shows that `ranks` ranks cannot have equal parts of
    layers."""
    model, _ = classes(config)
    kind = config["model_type"]
    if not hasattr(model, "shard"):
        raise OptionError(
            f"mlx-lm cannot divide the layers of a model of type {kind}: try distributed pipeline, "
            "or one machine"
        )
    text = text_config(config)
    heads = text.get("num_attention_heads")
    keys = text.get("num_key_value_heads") or heads
    shared = kind in SHARES_KEYS and isinstance(keys, int) and ranks % keys == 0
    latent = any(text.get(name) for name in LATENT_KEYS)
    counts = {"attention heads": heads, "key-value heads": None if shared or latent else keys}
    check_even({what: count for what, count in counts.items() if isinstance(count, int)}, ranks)


def divide(network: nn.Module, group: mx.distributed.Group, *, pipeline: bool) -> None:
    """Reduce a network to this rank's part, lazily.

    Args:
        network: The network, which is changed in place.
        group: The ranks that share it.
        pipeline: Divide the list of layers instead of each layer.
    Raises:
        OptionError: If the network cannot be divided in this way."""
    modules = (network, *network.modules())
    heads = [(module, module.lm_head) for module in modules if "lm_head" in module]
    if pipeline:
        _pipeline(network, group)
    else:
        refine(network, group.size())
        try:
            network.shard(group)
        except (AssertionError, ValueError) as problem:
            raise OptionError(
                f"{group.size()} ranks cannot have equal parts of the model "
                f"({first_line(problem):.200}): take fewer, or weights that are not quantized"
            ) from None
    for holder, head in heads:
        # Only rank 0 needs logits. It has the whole head, so that parts need not be gathered.
        holder.lm_head = NoHead(head) if group.rank() else head
        if getattr(holder, "sharding_group", None) is not None:
            holder.sharding_group = None


class NoHead(nn.Module):
    """A replacement for an output head whose logits are not used, so that its weights are not read
    from the file."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.weight = mx.zeros((head.weight.shape[0], 0), dtype=head.weight.dtype)

    def __call__(self, states: mx.array) -> mx.array:
        shape = (*states.shape[:-1], self.weight.shape[0])
        return mx.broadcast_to(mx.ones((), dtype=states.dtype), shape)


def _pipeline(network: nn.Module, group: mx.distributed.Group) -> None:
    inner: Any = getattr(network, "model", None)
    plain = all(type(cache) is KVCache for cache in make_prompt_cache(network))
    if not hasattr(inner, "pipeline") or not plain:
        raise OptionError(
            f"models of type {family_of(network)} cannot be a pipeline: try distributed tensor, or "
            "one machine"
        )
    layers = len(inner.layers)
    if group.size() > layers:
        raise OptionError(
            f"{group.size()} ranks cannot share {layers} layers: take {layers} ranks or fewer"
        )
    inner.pipeline(group)
