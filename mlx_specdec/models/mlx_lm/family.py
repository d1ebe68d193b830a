"""The family of all decoder-only models that mlx-lm implements; see `loading.Family`. It adapts,
casts and quantizes a model of mlx-lm, and divides it among ranks. mlx-lm applies the adapters that
it has trained (LoRA, DoRA, or whole layers)."""

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.utils import load_adapters

from ...checkpoints import files
from ...checkpoints.disk import read_json
from ...checkpoints.files import LAYER_COUNT_KEYS, text_config
from ...checkpoints.formats import safetensors
from ...checkpoints.tensors import dtype_name
from ...errors import CheckpointError, OptionError, SpecdecError, device_problem, first_line
from ...text.tokenizer import Tokenizer
from ...types import FINAL, rectangle
from ..base import Base, Ids, LoadSettings, Trainable, family_of, identity_of, places
from ..cache_settings import OWN_CACHES, CacheSettings
from ..distributed.sharding import check_even, whole_groups
from ..number_format import NumberFormat, count, evaluate, expand, is_quantized, on_cpu, quantize
from . import rotary, spellings
from .loader import arguments_of, cannot_build, classes, open_model
from .mends import mend
from .model import DecoderOnlyModel

SHARES_KEYS = ("qwen3_5", "qwen3_5_moe", "qwen3_5_text")
"""Families that repeat key-value heads if there are fewer of them than ranks."""
LATENT_KEYS = ("kv_lora_rank", "q_lora_rank")
"""Keys of config.json that show latent attention. There all heads share one array, which every rank
holds, so the number of key-value heads does not matter."""


def trainable(network: nn.Module) -> Trainable:
    """See `loading.Family`. Raises OptionError for a model that hides the input of its head."""
    # Outside training mode some models use a kernel that has no gradient.
    network.train()
    model = DecoderOnlyModel(network)
    model.capture(FINAL)

    def inputs(prompts: Sequence[Ids], texts: Sequence[Ids]) -> tuple[mx.array, ...]:
        pairs = list(zip(prompts, texts, strict=True))
        tokens = rectangle([[*prompt, *text[:-1]] for prompt, text in pairs])
        spans = [(len(prompt) - 1, len(prompt) - 1 + len(text)) for prompt, text in pairs]
        return tokens, mx.array(places(spans, tokens.shape[1]))

    def logits(tokens: mx.array, trained: mx.array) -> mx.array:
        # The head is computed for the trained rows only.
        states = model.run(tokens, None, (FINAL,)).hidden[FINAL]
        return model.head(states.reshape(-1, states.shape[-1])[trained][None])[0]

    return Trainable(network, inputs, logits)


def languages(network: nn.Module, tokenizer: Tokenizer) -> None:
    """Return None: chat templates and instructions name the language."""


def empty(config: Mapping[str, Any], like: nn.Module) -> Base:
    """See `loading.Family`. Raises OptionError for a shape that the family cannot build, such as
    too few layers for one of each kind."""
    try:
        network = network_of(config, "the draft")
        mx.eval(network.parameters())
        return DecoderOnlyModel(network, max_length(config, network))
    except (CheckpointError, IndexError, ValueError) as problem:
        raise OptionError(
            f"a model of type {config.get('model_type')} cannot have this shape: give more layers, "
            "or a draft model to begin with"
        ) from problem


def with_layers(config: Mapping[str, Any], chosen: Sequence[int]) -> dict[str, Any]:
    """See `loading.Family`. Lists with one entry per layer keep the entries of the chosen
    layers."""
    changed = dict(config)
    inner = config.get("text_config")
    if isinstance(inner, Mapping) and any(key in inner for key in LAYER_COUNT_KEYS):
        return {**changed, "text_config": with_layers(inner, chosen)}
    named = [key for key in LAYER_COUNT_KEYS if isinstance(config.get(key), int)]
    if not named:
        raise CheckpointError("config.json does not say how many layers there are")
    layers = config[named[0]]
    for key, value in config.items():
        if key in named:
            changed[key] = len(chosen)
        elif isinstance(value, list) and len(value) == layers:
            changed[key] = [value[number] for number in chosen if number < layers]
    return changed


def network_of(config: Mapping[str, Any], name: str) -> nn.Module:
    """Build mlx-lm's model, whose weights are lazy and random.

    Raises:
        CheckpointError: If mlx-lm cannot build the model."""
    model_class, arguments = classes(config)
    try:
        network = model_class(arguments_of(config, arguments))
        mend(network, config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None
    except Exception as error:  # mlx-lm does not validate settings, so any error can occur
        raise CheckpointError(f"{name}: {cannot_build(error)}") from error
    network.eval()
    return network


ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapters.safetensors"


def load(
    directory: Path, config: Mapping[str, Any], how: LoadSettings
) -> tuple[DecoderOnlyModel, tuple[int, ...], str]:
    """Load a model as `loading.Family.load` says. `how.numbers.q_bits` applies to the layers that
    mlx-lm's converter quantizes."""
    caches, group, pipeline = how.caches, how.group, how.pipeline
    if group is not None and not pipeline:
        check_shares(config, group.size())
    source = files.Weights(directory)
    tensors = {name: source.read(name) for name in source.infos}
    opened = open_model(directory, config, source, tensors)
    model = opened.model
    model.load_weights(list(opened.weights.items()))
    model.note = source.note()
    del opened, tensors, source  # free the tensors as soon as the model has replaced them
    adapted = None if how.adapter is None else adapt(model, how.adapter)
    with_numbers(model, str(directory), how.numbers)
    words = describe_numbers(model)
    if group is not None:
        divide(model, group, pipeline=pipeline)
    if (window := spellings.window(config, classes(config)[1])) is not None:
        warnings.warn(
            f"config.json wants a window of {window:,} tokens, which mlx-lm does not apply to "
            f"models of type {config['model_type']}: sequences end at {window:,} tokens",
            RuntimeWarning,
            stacklevel=2,
        )
    try:
        evaluate(model)
        # The identity marks entries of a prompt cache, which models of several ranks do not have.
        identity = None if group else identity_of(config, words, caches, adapted)
        runnable = DecoderOnlyModel(
            model, max_length(config, model, caches), caches, identity, group, pipeline=pipeline
        )
        evaluate(model)  # evaluate again: gemma3n replaces weights when a pass is built
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
    except Exception as problem:  # a pass is built, which fails if settings do not fit each other
        raise CheckpointError(f"{directory}: {cannot_build(problem)}") from problem
    eos = files.eos_token_ids(directory, config)
    return runnable, eos or files.eos_token_ids(directory, text_config(config)), words


def adapt(model: nn.Module, adapter: Path) -> dict[str, Any]:
    """Apply an adapter, a directory that mlx-lm's training wrote, to a model in place and lazily.
    Return adapter_config.json. Raises CheckpointError if the adapter does not fit, or lacks a
    tensor."""
    config, file = read_json(adapter / ADAPTER_CONFIG), adapter / ADAPTER_WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{adapter} is no adapter of mlx-lm: it has no {ADAPTER_WEIGHTS}")
    stored = safetensors.read_header(file)
    model.freeze()  # so that what an adapter trains can be told from the rest
    try:
        load_adapters(model, str(adapter))
        if config.get("fine_tune_type") == "full":
            for layer in model.layers[-max(config["num_layers"], 0) :]:
                layer.unfreeze()
    except Exception as problem:  # mlx-lm checks little, so any error can occur
        reason = " ".join(str(problem).split())
        raise CheckpointError(
            f"{adapter} does not fit the model ({type(problem).__name__}: {reason:.200}): name the "
            "model that it was trained on"
        ) from problem
    # Older versions of mlx-lm adapt fewer kinds of modules, but also in all of the layers.
    kinds = {_kind(name) for name in stored}
    trained = {name for name, _ in tree_flatten(model.trainable_parameters())}
    if lacking := sorted(name for name in trained - stored.keys() if _kind(name) in kinds):
        raise CheckpointError(
            f"{file} lacks {len(lacking)} of the adapter's tensors, such as {lacking[0]}: copy the "
            "adapter again, or name the model that it was trained on"
        )
    model.unfreeze()
    model.eval()  # in training mode the new layers apply dropout
    return config


def _kind(name: str) -> str:
    """Return the path of a tensor's module without the number of its layer."""
    return re.sub(r"\.\d+\.", ".", name.rpartition(".")[0])


def with_numbers(model: nn.Module, name: str, numbers: NumberFormat) -> None:
    """Cast, dequantize or quantize a model in place.

    Args:
        numbers: The dtype and the quantization to use.
    Raises:
        OptionError: If the model is quantized already and `numbers` asks for quantization."""
    quantized = is_quantized(model)
    numbers.check_plain(name, quantized)
    casts = numbers.dtype != "auto" or on_cpu()
    if casts:
        cast(model, numbers.floating(mx.float32))
    if quantized and numbers.expands(count(model)):
        # Dequantized values have the dtype of the scales, so scales are cast to float32 before.
        # Modes other than affine give bfloat16, so values are cast again.
        expand(model)
        if casts:
            cast(model, numbers.floating(mx.float32))
    if numbers.q_bits is not None:
        choose = getattr(model, "quant_predicate", None) or (lambda path, module: True)
        quantize(model, numbers.q_bits, numbers.q_group_size, choose)


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating-point weights lazily, except those that the model excludes."""
    may_cast = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, array: mx.array) -> mx.array:
        changes = may_cast(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if changes else array

    model.update(tree_map_with_path(change, model.parameters()))


def max_length(
    config: Mapping[str, Any], model: nn.Module, caches: CacheSettings = OWN_CACHES
) -> int | None:
    """Return the largest number of tokens in a sequence that config.json allows, or None if there
    is no limit. caches: Settings of the KV cache. With a window (`max_size`) there is no limit."""
    if (window := spellings.window(config, classes(config)[1])) is not None:
        return window
    for part in (text_config(config), config):
        if isinstance(length := part.get("max_position_embeddings"), int):
            # Beyond this length dynamic rotary positions depend on the number of rows in a pass.
            if any("Dynamic" in type(module).__name__ for module in model.modules()):
                return length
            unlimited = caches.max_size is not None
            return None if unlimited else max(length, _scaled_length(part, length))
        if isinstance(part.get("n_positions"), int):
            return int(part["n_positions"])
    return None


def _scaled_length(config: Mapping[str, Any], length: int) -> int:
    """Return the longest sequence that scaled rotary positions reach, or `length` without
    scaling."""
    scaling = rotary.scaling(config) or {}
    factor = scaling.get("factor")
    extends = rotary.kind_of(scaling) in ("linear", "llama3", "yarn")
    if not extends or not isinstance(factor, int | float):
        return length
    original = scaling.get("original_max_position_embeddings")
    return int((original if isinstance(original, int) else length) * factor)


def describe_numbers(model: nn.Module) -> str:
    """Return the dtype and quantization in words, such as "bfloat16" or "4-bit, bfloat16"."""
    sizes: dict[str, int] = {}
    for _, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            name = dtype_name(array.dtype)
            sizes[name] = sizes.get(name, 0) + array.nbytes
    floating = max(sizes, key=lambda name: sizes[name])
    bits = sorted({module.bits for module in model.modules() if hasattr(module, "bits")})
    return f"{'/'.join(map(str, bits))}-bit, {floating}" if bits else floating


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
        for path, module in network.named_modules():
            if not path.endswith("lm_head"):  # the head is not divided
                whole_groups(module, group.size())
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
