"""Corrections of mlx-lm's families, so that a network computes what config.json says.

A mend changes a network that was just built, before its weights are loaded. The docstring of a mend
says what the network computes from then on. tests/contract/test_configurations.py compares every
family with transformers, and `tests/models/test_mends.py` fails as soon as mlx-lm computes the same
by itself, so that the mend can go."""

import math
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

from ...checkpoints.files import FULL_ATTENTION, SLIDING_ATTENTION, text_config
from ..patches import MENDED
from . import rotary

Part = Mapping[str, Any]
TANH = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")
"""Names in config.json of the approximation of GELU by tanh."""
NO_CAP = 2.0**20
"""A cap that changes no float32 or bfloat16 score: tanh(x / cap) * cap == x."""
ERNIE, EXPERT_BIAS = "Ernie4_5_MoeMLP", "e_score_correction_bias"
"""The class of ERNIE's blocks of experts, and their tensor for the choice of experts."""
ALL_SLIDE = ("ministral3", "mistral", "mixtral", "phi3", "phimoe", "starcoder2")
"""Types whose layers all slide if `sliding_window` is set and `layer_types` is not."""
SLIDE_IN_PART = ("gemma2", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Types whose `layer_types` mlx-lm ignores."""


def mend(network: nn.Module, config: Part) -> None:
    """Apply the mends of the network's type."""
    kind = str(config.get("model_type"))
    for apply in (*OF_ALL_TYPES, *MENDS.get(kind, ())):
        apply(network, text_config(config))


def reads(part: Part) -> tuple[str, ...]:
    """Return the keys of config.json that mends read and that the family itself does not read."""
    kind = str(part.get("model_type"))
    windows = ("sliding_window", "use_sliding_window", "max_window_layers")
    return (*(windows if kind in (*ALL_SLIDE, *SLIDE_IN_PART) else ()), *READ.get(kind, ()))


def _named(network: nn.Module, ending: str) -> list[nn.Module]:
    """Return the modules whose class has a name with this ending."""
    return [module for module in network.modules() if type(module).__name__.endswith(ending)]


# Windows.


def kinds_of(part: Part) -> list[str]:
    """Return for each layer whether it slides, or [] if no layer does."""
    kind, count = part.get("model_type"), part.get("num_hidden_layers")
    window, longest = part.get("sliding_window"), part.get("max_position_embeddings")
    if not isinstance(window, int) or not isinstance(count, int):
        return []
    if isinstance(longest, int) and window >= longest:
        return []  # no sequence reaches the window, and plain caches can be cut anywhere
    kinds = list(part.get("layer_types") or ())
    if kind in SLIDE_IN_PART and not kinds:
        kinds = _older_kinds(str(kind), part, count)
    elif kind in ALL_SLIDE and not kinds:
        kinds = [SLIDING_ATTENTION] * count
    return kinds if kind in (*ALL_SLIDE, *SLIDE_IN_PART) and SLIDING_ATTENTION in kinds else []


def _older_kinds(kind: str, part: Part, count: int) -> list[str]:
    """Return the kinds of layers that transformers derives from keys of older versions."""
    if kind == "gemma2":
        return [FULL_ATTENTION if i % 2 else SLIDING_ATTENTION for i in range(count)]
    if kind == "qwen3_moe":
        return [SLIDING_ATTENTION if part.get("use_sliding_window") else FULL_ATTENTION] * count
    first = part.get("max_window_layers", 28) if part.get("use_sliding_window") else count
    return [SLIDING_ATTENTION if i >= first else FULL_ATTENTION for i in range(count)]


def windows(network: nn.Module, part: Part) -> None:
    """Let layers attend to `sliding_window` tokens only, with caches that keep no more. mlx-lm
    ignores this key (mlx-lm#44, closed)."""
    if not (kinds := kinds_of(part)):
        return
    window = int(part["sliding_window"])

    def attend(size: int | None) -> Callable[..., Any]:
        def call(plain: Any, layer: nn.Module, x: mx.array, *rest: Any, **named: Any) -> Any:
            # The last arguments are the mask and the cache, which some families name.
            *before, _, cache = (*rest, *named.values())
            mask = create_attention_mask(x, cache, window_size=size)
            return plain(layer, x, *before, mask, cache)

        return call

    for kind, size in ((SLIDING_ATTENTION, window), (FULL_ATTENTION, None)):
        layers = [layer for layer, k in zip(network.layers, kinds, strict=True) if k == kind]
        MENDED.extend(layers, __call__=attend(size))
    makers = [
        (lambda: RotatingKVCache(window)) if k == SLIDING_ATTENTION else KVCache for k in kinds
    ]
    MENDED.extend([network], make_cache=lambda *_: [make() for make in makers])


# Rotary positions.


def yarn(network: nn.Module, part: Part) -> None:
    """Compute YaRN with `truncate` (vllm#27722) and `attention_factor`, as transformers does."""
    settings = rotary.scaling(part) or {}
    if rotary.kind_of(settings) != "yarn":
        return
    stated = settings.get("attention_factor")
    for rope in _named(network, "YarnRoPE"):
        if settings.get("truncate", True) is False:
            base = settings.get("rope_theta") or part.get("rope_theta") or 10000.0
            MENDED.apply(rope, "_freqs", yarn_freqs(rope.dims, float(base), settings))
        if stated is not None:
            MENDED.apply(rope, "mscale", float(stated))


def yarn_freqs(dims: int, base: float, settings: Part) -> mx.array:
    """Return the wavelengths of YaRN over 2 pi without rounding the bounds of the ramp, shape
    (dims // 2,), float32. Source: Peng et al., arXiv 2309.00071, as transformers computes it."""
    factor, length = settings["factor"], settings["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return dims * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(dim_of(settings.get("beta_fast") or 32), 0)
    high = min(dim_of(settings.get("beta_slow") or 1), dims - 1)
    ramp = (mx.arange(dims // 2, dtype=mx.float32) - low) / max(high - low, 0.001)
    share = 1 - mx.clip(ramp, 0, 1)
    freqs = base ** (mx.arange(0, dims, 2, dtype=mx.float32) / dims)
    return 1 / (share / freqs + (1 - share) / (factor * freqs))


def scaled_rotary(network: nn.Module, part: Part) -> None:
    """Scale positions in a family that ignores `rope_scaling`."""
    settings = rotary.scaling(part)
    if settings is None:
        return
    base = float(settings.get("rope_theta") or part.get("rope_theta") or 10000.0)
    length = int(part["max_position_embeddings"])
    for layer in network.layers:
        plain = layer.self_attn.rope
        scaled = initialize_rope(plain.dims, base, plain.traditional, dict(settings), length)
        MENDED.apply(layer.self_attn, "rope", scaled)


def longrope(network: nn.Module, part: Part) -> None:
    """Let a network's passes use either set of rotary factors of LongRoPE (mlx-lm#660): those for
    short sequences, or those for long ones. Source: Ding et al., arXiv 2402.13753."""
    settings = rotary.scaling(part) or {}
    if rotary.kind_of(settings) not in ("longrope", "su"):
        return
    factors = SimpleNamespace(most=int(settings["original_max_position_embeddings"]), long=True)

    def call(plain: Any, rope: nn.Module, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        if factors.long:
            return plain(rope, x, offset)
        dims, scale, freqs = rope.dim, rope.short_scale, rope.short_freqs
        scaled = x.at[..., :dims].multiply(scale)
        return mx.fast.rope(
            scaled, dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=freqs
        )

    short, long = (mx.array(settings[f"{name}_factor"], mx.float32) for name in ("short", "long"))
    for rope in _named(network, "SuScaledRoPE"):
        scale = settings.get("attention_factor") or rope._scale
        MENDED.apply(rope, "_scale", settings.get("long_mscale") or scale)
        # Attributes in `vars` are no parameters of the module.
        vars(rope).update(factors=factors, short_freqs=rope._freqs / long * short)
        vars(rope)["short_scale"] = settings.get("short_mscale") or scale
        MENDED.extend([rope], __call__=call)


def factors_of(network: nn.Module) -> Any:
    """Return None if a network's rotary factors do not depend on the length of a sequence.
    Otherwise return an object with `most`, the longest sequence for which the short factors are
    made, and `long`, whether the next passes use the long factors."""
    ropes = (vars(module) for module in network.modules())
    return next((attributes["factors"] for attributes in ropes if "factors" in attributes), None)


def partial_rotary(network: nn.Module, part: Part) -> None:
    """Rotate only a share of each head."""
    share = rotary.rotated_share(part) or 0.5
    for layer in network.layers:
        attention = layer.self_attn
        MENDED.apply(attention.rope, "dims", int(attention.head_dim * share))


def halves(network: nn.Module, part: Part) -> None:
    """Rotate the two halves of a head instead of neighbors, if `rope_interleave` is false."""
    if part.get("rope_interleave", True) is False:
        for layer in network.layers:
            MENDED.apply(layer.self_attn.rope, "traditional", False)


# Activations and scales.


def gelu(network: nn.Module, part: Part) -> None:
    """Compute the GELU that config.json names in feed-forward layers: exact, or by tanh."""
    name = next((part[key] for key in ACTIVATION_KEYS if part.get(key)), TANH[0])
    exact = nn.gelu_approx if part.get("model_type") == "gemma" else nn.gelu
    # In a Gemma, "gelu" is the name of the approximation in files of the first release.
    function = {**dict.fromkeys(TANH, nn.gelu_approx), "gelu": exact}.get(name)
    if function is None:
        return

    def call(_: Any, mlp: nn.Module, x: mx.array) -> mx.array:
        if "gate_proj" in mlp:
            return mlp.down_proj(function(mlp.gate_proj(x)) * mlp.up_proj(x))
        names = ("c_fc", "c_proj") if "c_fc" in mlp else ("dense_h_to_4h", "dense_4h_to_h")
        return mlp[names[1]](function(mlp[names[0]](x)))

    MENDED.extend(_named(network, "MLP"), __call__=call)


def embedding_scale(network: nn.Module, part: Part) -> None:
    """Scale float32 embeddings by the square root of the width, which mlx-lm rounds to bfloat16. In
    a RecurrentGemma, scale them by the square root in bfloat16 instead, as transformers does."""
    rounds = part.get("model_type") == "recurrent_gemma"

    def call(plain: Any, table: nn.Module, x: mx.array) -> mx.array:
        states = plain(table, x)
        exact = math.sqrt(states.shape[-1])
        rounded = float(mx.array(exact, mx.bfloat16).item())  # type: ignore[arg-type]
        ratio = rounded / exact if rounds else exact / rounded
        return states * ratio if states.dtype == mx.float32 else states

    tables = [m for name, m in network.named_modules() if name.endswith("embed_tokens")]
    MENDED.extend(tables, __call__=call)


def tied_scale(network: nn.Module, part: Part) -> None:
    """Divide the states before a tied head by `hidden_size / dim_model_base`, too."""
    if part.get("tie_word_embeddings", True):
        divisor = part["hidden_size"] / part["dim_model_base"]

        def call(plain: Any, norm: nn.Module, x: mx.array) -> mx.array:
            return plain(norm, x) / divisor

        MENDED.extend([network.model.norm], __call__=call)


def soft_cap(network: nn.Module, part: Part) -> None:
    """Cap logits softly at `final_logit_softcapping`."""
    if cap := part.get("final_logit_softcapping"):

        def call(plain: Any, model: nn.Module, *args: Any, **kwargs: Any) -> mx.array:
            return mx.tanh(plain(model, *args, **kwargs) / cap) * cap

        MENDED.extend([network], __call__=call)


def without_caps(network: nn.Module, part: Part) -> None:
    """Cap neither attention scores nor logits if config.json sets the cap to null."""
    if part.get("final_logit_softcapping", 0) is None:
        MENDED.apply(network, "final_logit_softcapping", NO_CAP)
    if part.get("attn_logit_softcapping", 0) is None:
        for layer in network.layers:
            MENDED.apply(layer.self_attn, "attn_logit_softcapping", NO_CAP)


def time_steps(network: nn.Module, part: Part) -> None:
    """Bound the time steps of Mamba by `time_step_min` from below, as transformers does. mlx-lm's
    bound, `time_step_limit`, can be defended as well."""
    if (least := part.get("time_step_min")) is not None:
        for mixer in _named(network, "Mamba2Mixer"):
            MENDED.apply(mixer, "time_step_limit", (float(least), math.inf))


def grouped_norm(network: nn.Module, part: Part) -> None:
    """Normalize each group of channels by itself, and not all channels at once."""
    groups = int(part.get("mamba_n_groups") or 1)
    if groups < 2:
        return

    def call(_: Any, norm: nn.Module, x: mx.array, gate: mx.array | None = None) -> mx.array:
        before = getattr(norm, "norm_before_gate", False)
        if gate is not None and not before:
            x = x * nn.silu(gate)
        eps = norm.variance_epsilon if "variance_epsilon" in vars(norm) else norm.eps
        parts = mx.fast.rms_norm(mx.unflatten(x, -1, (groups, -1)), None, eps)
        x = norm.weight * parts.flatten(-2)
        return x * nn.silu(gate) if gate is not None and before else x

    MENDED.extend(_named(network, "RMSNormGated"), __call__=call)


# Routing.


def routing_bias(network: nn.Module, part: Part) -> None:
    """Choose experts by the scores plus a stored bias."""

    def call(_: Any, experts: nn.Module, x: mx.array) -> mx.array:
        gates = experts.gate_act(experts.gate(x).astype(mx.float32))
        k, biased = experts.k, gates + experts[EXPERT_BIAS]
        chosen = mx.argpartition(-biased, kth=k - 1, axis=-1)[..., :k]
        scores = mx.take_along_axis(gates, chosen, axis=-1)
        scores = scores / mx.maximum(scores.sum(axis=-1, keepdims=True), 1e-12)
        y = experts.switch_mlp(x, chosen)
        y = (y * scores[..., None]).sum(axis=-2).astype(y.dtype)
        shared = experts.shared_experts
        return y if shared is None else y + shared(x)

    experts = _named(network, ERNIE)
    for module in experts:
        module[EXPERT_BIAS] = mx.zeros((int(part["moe_num_experts"]),))
    MENDED.extend(experts, __call__=call)


def softmax_over_all(network: nn.Module, part: Part) -> None:
    """Take the weights of the chosen experts from the softmax over all experts."""

    def call(_: Any, experts: nn.Module, x: mx.array) -> mx.array:
        k = experts.num_experts_per_tok
        gates = mx.softmax(experts.router(x).astype(mx.float32), axis=-1)
        chosen = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
        scores = mx.take_along_axis(gates, chosen, axis=-1).astype(x.dtype)
        return (experts.switch_mlp(x, chosen) * scores[..., None]).sum(axis=-2)

    MENDED.extend(_named(network, "JambaSparseMoeBlock"), __call__=call)


# Tensors.


def dropped(network: nn.Module, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors that mlx-lm's `sanitize` drops and that a mend reads, by the names of the
    network's parameters: routing biases, or zeros. Checkpoints that mlx-lm has converted have
    lost their biases."""
    found = {}
    for path, module in network.named_modules():
        if type(module).__name__ == ERNIE:
            names = (f"{path}.{EXPERT_BIAS}", f"{path}.moe_statics.{EXPERT_BIAS}")
            stored = next((tensors[name] for name in names if name in tensors), module[EXPERT_BIAS])
            found[names[0]] = stored.reshape(-1)
    return found


def _of_falcon_h1(part: Part, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Multiply keys by `key_multiplier` and values by `attention_in_multiplier`, which `sanitize`
    leaves out (mlx-lm#1622). Weights that mlx-lm has converted lack these factors for good."""
    convolution = tensors.get("model.layers.0.mamba.conv1d.weight")
    if convolution is None or convolution.shape[-1] <= convolution.shape[1]:
        return tensors
    keys, into = part.get("key_multiplier", 1.0), part.get("attention_in_multiplier", 1.0)
    factors = {"k_proj.weight": keys, "k_proj.bias": keys, "v_proj.weight": into}
    for name in tensors:
        if ".self_attn." in name:
            tensors[name] *= factors.get(".".join(name.split(".")[-2:]), 1.0)
    return tensors


def _of_gemma3n(part: Part, tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Give layers that share the keys and values of others the unused weights that mlx-lm wants."""
    layers = int(part["num_hidden_layers"])
    first = layers - int(part.get("num_kv_shared_layers") or 0)
    for name in ("k_proj", "v_proj", "k_norm"):
        path = "model.language_model.layers.{}.self_attn." + f"{name}.weight"
        for layer in range(first, layers):
            if path.format(first - 1) in tensors:
                tensors.setdefault(path.format(layer), tensors[path.format(first - 1)])
    return tensors


OF_ALL_TYPES = (windows, yarn, longrope)
MENDS: dict[str, Iterable[Callable[[nn.Module, Part], None]]] = {
    "deepseek_v3": (halves,),
    "ernie4_5_moe": (routing_bias,),
    "falcon_h1": (grouped_norm,),
    "gemma": (gelu,),
    "gemma2": (without_caps,),
    "gemma3": (soft_cap, embedding_scale),
    "gemma3_text": (soft_cap, embedding_scale),
    "glm": (partial_rotary,),
    "gpt_bigcode": (gelu,),
    "gpt_neox": (gelu,),
    "granitemoehybrid": (grouped_norm,),
    "jamba": (softmax_over_all,),
    "minicpm3": (tied_scale,),
    "nemotron_h": (time_steps,),
    "qwen3_moe": (scaled_rotary, yarn),
    "recurrent_gemma": (embedding_scale,),
    "starcoder2": (gelu,),
}
"""Type -> the mends of this type. Entries of OF_ALL_TYPES come before them."""
ACTIVATION_KEYS = ("hidden_activation", "hidden_act", "activation_function")
READ = {
    "deepseek_v3": ("rope_interleave",),
    **dict.fromkeys(("gemma", "gpt_bigcode", "gpt_neox", "starcoder2"), ACTIVATION_KEYS),
    "gemma3_text": ("final_logit_softcapping",),
    "mimo_v2_flash": ("sliding_window",),  # under another name
    "nemotron_h": ("sliding_window",),  # transformers ignores it, too
}
"""Type -> keys that its mends read."""
TENSOR_MENDS = {
    "falcon_h1": _of_falcon_h1,
    "gemma3n": _of_gemma3n,
    "gemma3n_text": _of_gemma3n,
}
"""Type -> a function that returns the tensors of a checkpoint of transformers as mlx-lm's
`sanitize` should get them."""
