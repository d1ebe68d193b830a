"""A directory -> a model of mlx-lm ready to run: adapted, cast, quantized, and divided among ranks.
mlx-lm puts on the adapters that it has trained (LoRA, DoRA, or whole layers); what it does not
check is checked first."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import dequantize_model, load_adapters

from ...checkpoints import files
from ...checkpoints.disk import read_json
from ...checkpoints.formats import safetensors
from ...checkpoints.tensors import dtype_name
from ...errors import CheckpointError, OptionError, SpecdecError, device_problem, first_line
from ..base import identity_of
from ..cache_settings import CacheSettings
from ..number_format import NumberFormat, count, evaluate, is_quantized, on_cpu, quantize
from ..sharding import check_even, refine
from . import rotary
from .loader import cannot_build, classes, open_model, text_config
from .model import DecoderOnlyModel
from .network import type_name

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
ADAPTED = ("lora_a", "lora_b", "m")
"""The last part of the names of tensors that mlx-lm adds to adapted layers."""
SHARES_KEYS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text")
"""Families that repeat keys and values where there are fewer of their heads than ranks."""
LATENT = ("kv_lora_rank", "q_lora_rank")
"""Of configurations whose keys and values are one array for all heads, which every rank has."""


def load(
    directory: Path,
    config: Mapping[str, Any],
    numbers: NumberFormat,
    caches: CacheSettings | None,
    adapter: Path | None = None,
    group: mx.distributed.Group | None = None,
    *,
    pipeline: bool = False,
) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    """See `families.Family.load`; q_bits quantizes the layers that mlx-lm's converter would."""
    if group is not None and not pipeline:
        check_shares(config, group.size())
    source = files.Weights(directory)
    given = {name: source.read(name) for name in source.infos}
    opened = open_model(directory, config, source, given)
    model = opened.model
    model.load_weights(list(opened.weights.items()))
    del opened, given, source  # nothing else keeps the weights alive
    adapted = None if adapter is None else adapt(model, adapter)
    model = with_numbers(model, str(directory), numbers)
    words = describe_numbers(model)
    if group is not None:
        divide(model, group, pipeline=pipeline)
    try:
        evaluate(model)
        # Ranks try the model together, whatever some of them know of it.
        identity = None if group else identity_of(config, words, caches, adapted)
        runnable = DecoderOnlyModel(
            model, max_length(config, model, caches), caches, identity, group, pipeline=pipeline
        )
        evaluate(model)  # again: gemma3n replaces weights when a pass is built
    except RuntimeError as problem:
        on_metal = mx.metal.is_available() and not on_cpu()
        if on_metal or device_problem(problem) or "metal" not in str(problem).lower():
            raise
        raise CheckpointError(
            f"{directory} needs a kernel that MLX has on Metal only ({first_line(problem):.100}): "
            "run it on a Mac's GPU"
        ) from problem
    except (SpecdecError, MemoryError, OSError):
        raise
    except Exception as problem:  # building one pass shows what config.json has that cannot be run
        raise CheckpointError(f"{directory}: {cannot_build(problem)}") from problem
    eos = files.eos_token_ids(directory, config)
    return runnable, eos or files.eos_token_ids(directory, text_config(config)), words


def adapt(model: nn.Module, adapter: Path) -> dict[str, Any]:
    """Put an adapter, the directory that mlx-lm wrote, onto a model, lazily, and return its
    configuration. Raises CheckpointError."""
    config = read_json(adapter / CONFIG)
    if not (adapter / WEIGHTS).is_file():
        raise CheckpointError(f"{adapter} is no adapter of mlx-lm: it has no {WEIGHTS}")
    stored = safetensors.read_header(adapter / WEIGHTS)
    try:
        load_adapters(model, str(adapter))
    except Exception as problem:  # mlx-lm checks little: whatever fails first tells
        said = " ".join(str(problem).split())
        raise CheckpointError(
            f"{adapter} does not fit the model ({type(problem).__name__}: {said:.200}): name the "
            "model that it was trained on"
        ) from problem
    _check_complete(model, adapter, config, stored)
    model.eval()  # New layers drop values at random in training mode.
    return config


def _check_complete(
    model: nn.Module, adapter: Path, config: Mapping[str, Any], stored: Collection[str]
) -> None:
    """Raise CheckpointError if an adapted layer lacks a tensor: mlx-lm draws it at random."""
    names = [name for name, _ in tree_flatten(model.parameters())]
    wanted = [name for name in names if name.rpartition(".")[2] in ADAPTED]
    settings = config.get("lora_parameters")
    if isinstance(settings, Mapping) and settings.get("keys") is None:
        # Earlier versions of mlx-lm adapted fewer kinds of layers by default.
        kinds = {_kind(name) for name in stored}
        wanted = [name for name in wanted if _kind(name) in kinds]
    missing = [name for name in wanted if name not in stored]
    if missing or not stored:
        example = f", such as {missing[0]:.200}" if missing else ""
        raise CheckpointError(
            f"{adapter / WEIGHTS} lacks {len(missing) or 'all'} of its tensors{example}: copy the "
            "adapter again"
        )


def _kind(name: str) -> str:
    """Return the path of a tensor's module without the numbers of layers."""
    return re.sub(r"\d+", "", name.rpartition(".")[0])


def with_numbers(model: nn.Module, name: str, numbers: NumberFormat) -> nn.Module:
    """Return the model, cast and quantized lazily. name: for messages. Raises OptionError."""
    quantized = is_quantized(model)
    numbers.check_plain(name, quantized)
    casts = numbers.dtype != "auto" or on_cpu()
    if casts:
        cast(model, numbers.floating(mx.float32))
    if quantized and numbers.expands(count(model)):
        # Scales in float32 make the values exact; other modes than affine give bfloat16.
        model = dequantize_model(model)
        if casts:
            cast(model, numbers.floating(mx.float32))
    if numbers.q_bits is not None:
        choose = getattr(model, "quant_predicate", None) or (lambda path, module: True)
        quantize(model, numbers.q_bits, numbers.q_group_size, choose)
    return model


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating weights, lazily, but those that a model has in float32 always."""
    may = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, array: mx.array) -> mx.array:
        changes = may(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if changes else array

    model.update(tree_map_with_path(change, model.parameters()))


def max_length(
    config: Mapping[str, Any], model: nn.Module, caches: CacheSettings | None = None
) -> int | None:
    """Longest sequence in tokens that config.json allows; None: no end. Scaled positions reach
    further, and with a window none is too far, but rotations that follow the length of a sequence
    would depend on how many rows a pass has beyond it."""
    for part in (text_config(config), config):
        if isinstance(length := part.get("max_position_embeddings"), int):
            if any("Dynamic" in type(module).__name__ for module in model.modules()):
                return length
            windowed = caches is not None and caches.max_size is not None
            return None if windowed else max(length, _scaled_length(part, length))
        if isinstance(part.get("n_positions"), int):
            return int(part["n_positions"])
    return None


def _scaled_length(config: Mapping[str, Any], length: int) -> int:
    scaling = rotary.scaling(config) or {}
    factor = scaling.get("factor")
    known = rotary.kind_of(scaling) in ("linear", "llama3", "yarn")
    if not known or not isinstance(factor, int | float):
        return length
    original = scaling.get("original_max_position_embeddings")
    return int((original if isinstance(original, int) else length) * factor)


def describe_numbers(model: nn.Module) -> str:
    """The kind of weights, such as "bfloat16" or "4-bit, bfloat16"."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = dtype_name(array.dtype)
            sizes[name] = sizes.get(name, 0) + array.nbytes
    floating = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit, {floating}" if bits else floating


def check_shares(config: Mapping[str, Any], ranks: int) -> None:
    """Raise OptionError where config.json says that so many ranks cannot share the model."""
    model, _ = classes(config)
    kind = config["model_type"]
    if not hasattr(model, "shard"):
        raise OptionError(
            f"mlx-lm cannot divide the layers of a model of type {kind}: try distributed pipeline, "
            "or one machine"
        )
    text = text_config(config) or config
    heads = text.get("num_attention_heads")
    keys = text.get("num_key_value_heads") or heads
    shared = kind in SHARES_KEYS and isinstance(keys, int) and ranks % keys == 0
    latent = any(text.get(name) for name in LATENT)
    counts = {"attention heads": heads, "key-value heads": None if shared or latent else keys}
    whole = {what: count for what, count in counts.items() if isinstance(count, int)}
    check_even(whole, ranks)


def divide(network: nn.Module, group: mx.distributed.Group, *, pipeline: bool) -> None:
    """Keep this rank's part, lazily. Raises OptionError where a model cannot be divided so."""
    modules = (network, *network.modules())
    heads = [(each, each.lm_head) for each in modules if "lm_head" in each]
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
        # Rank 0 alone computes logits: it has the whole head, and nobody has to gather them.
        holder.lm_head = NoHead(head) if group.rank() else head
        if getattr(holder, "sharding_group", None) is not None:
            holder.sharding_group = None


class NoHead(nn.Module):
    """In the place of an output head whose logits are not used: its file is not read."""

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
            f"models of type {type_name(network)} cannot be a pipeline: try distributed tensor, or "
            "one machine"
        )
    layers = len(inner.layers)
    if group.size() > layers:
        raise OptionError(
            f"{group.size()} ranks cannot share {layers} layers: take {layers} ranks or fewer"
        )
    inner.pipeline(group)
