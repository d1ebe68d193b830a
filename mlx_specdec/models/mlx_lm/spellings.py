"""Translation of types, keys of config.json and names of tensors from transformers' spelling to the
one of mlx-lm's families, and keys that nobody reads. Rotary settings have a module of their own,
`rotary`.

A derived key is added only if the family reads it and config.json lacks it. `settings.json` lists
keys of each type that change the computation, with their neutral values.
`benchmarks/list_settings.py` writes it by rules from the configuration classes of transformers."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import mlx.core as mx

from ...checkpoints.files import SLIDING_ATTENTION, text_config
from ...errors import CheckpointError
from . import mends
from .rotary import names_of, rotated_share

Part = Mapping[str, Any]
SAME_AS = {
    "ministral": "llama",
    "gemma3n_text": "gemma3n",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""Type that mlx-lm does not know -> the family of mlx-lm that computes the same."""
TEXT_PARTS = ("gemma3n_text", "llama4_text")
"""Types of the text part of a multimodal model, saved without the other parts, which mlx-lm reads
as a part only."""


def _head_dim(part: Part) -> int | None:
    stated = part.get("head_dim")
    if stated is None and "hidden_size" in part and part.get("num_attention_heads"):
        return int(part["hidden_size"]) // int(part["num_attention_heads"])
    return stated


def _marks(key: str, mark: str, kind: Callable[[bool], Any] = bool) -> Callable[[Part], Any]:
    """Return a function that marks the entries of a list in config.json that equal `mark`."""
    return lambda part: [kind(entry == mark) for entry in part[key]] if part.get(key) else None


def _dense(part: Part) -> int | None:
    """Return the number of layers before the first one with experts."""
    kinds = part.get("mlp_layer_types")
    return None if not kinds else [*kinds, "sparse"].index("sparse")


def _pattern(part: Part) -> int | None:
    """Return n if every n-th layer, and no other, has full attention, as older keys say it."""
    kinds = list(part.get("layer_types") or ())
    if "full_attention" not in kinds:
        return len(kinds) + 1 if kinds else None
    n = kinds.index("full_attention") + 1
    regular = [bool(i % n) == (kind != "full_attention") for i, kind in enumerate(kinds, 1)]
    return n if all(regular) else None


DERIVED: dict[str, Callable[[Part], Any]] = {
    "head_dim": _head_dim,
    "num_experts": lambda part: part.get("num_local_experts"),
    "n_ctx": lambda part: part.get("n_positions"),
    "block_dim": lambda part: part.get("hidden_size"),
    "is_moe_layer": _marks("mlp_layer_types", "sparse"),
    "first_k_dense_replace": _dense,
    "sliding_window_pattern": _pattern,
    "sliding_window_size": lambda part: part.get("sliding_window"),
    "layernorm_epsilon": lambda part: part.get("rms_norm_eps"),
    "full_attention_interval": _pattern,
}
"""Key of mlx-lm's families -> the value that config.json states by other keys, or None."""


def _of_mimo(part: Part) -> dict[str, Any]:
    same = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    return {
        **{f"swa_{name}": part.get(name) for name in same},
        "swa_num_key_value_heads": 2 * int(part.get("num_key_value_heads") or 0),
        "hybrid_layer_pattern": _marks("layer_types", "sliding_attention", int)(part),
        "moe_layer_freq": _marks("mlp_layer_types", "sparse", int)(part),
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "n_shared_experts": None,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


OF_TYPE: dict[str, Callable[[Part], dict[str, Any]]] = {
    "apertus": lambda _: {"post_norm": False, "qk_norm": True, "mlp_bias": False},
    "deepseek_v2": lambda _: {"rope_scaling": {"factor": 1.0}},
    "exaone4": lambda part: {
        "sliding_window_pattern": "".join(
            "GL"[kind != "full_attention"] for kind in part.get("layer_types") or ()
        )
    },
    "gemma4_unified_text": lambda _: {"hidden_size_per_layer_input": 0},
    "glm_moe_dsa": lambda _: {
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "moe_layer_freq": 1,
    },
    "granitemoehybrid": lambda _: {"position_embedding_type": "nope"},
    "mamba2": lambda part: {"intermediate_size": int(part["num_heads"]) * int(part["head_dim"])},
    "mimo_v2_flash": _of_mimo,
    "minicpm3": lambda _: {"rope_scaling": {}},
    "minimax_m2": lambda part: {
        "rotary_dim": int((_head_dim(part) or 0) * (rotated_share(part) or 1)),
        "shared_intermediate_size": 0,
    },
    "solar_open": lambda _: {
        "intermediate_size": 0,
        "first_k_dense_replace": 0,
        "partial_rotary_factor": 1.0,
    },
}
"""Type -> a function that returns keys of mlx-lm's family, for those that config.json lacks."""
_LAYERS = {"linear_attention": "mamba", "full_attention": "attention"}


def family_type(config: Part) -> Any:
    """Return the name of mlx-lm's family for a configuration."""
    kind = config.get("model_type")
    if kind == "llama4_text" and config.get("interleave_moe_layer_step"):
        return "llama4"  # mlx-lm's module llama4_text has no experts
    return SAME_AS.get(kind, kind) if isinstance(kind, str) else kind


def spelled(config: Part, names: set[str]) -> dict[str, Any]:
    """Return config.json, and its `text_config`, with the keys that the family reads. names: The
    result of `names_of`."""
    changed = _spelled(config, names)
    if config.get("model_type") in TEXT_PARTS and "text_config" in names:
        return {"model_type": config["model_type"], "text_config": changed}
    if isinstance(inner := config.get("text_config"), Mapping):
        changed["text_config"] = _spelled(inner, names)
        if "vocab_size" in names and "vocab_size" in inner:
            changed.setdefault("vocab_size", inner["vocab_size"])
    return changed


def _spelled(part: Part, names: set[str]) -> dict[str, Any]:
    kind, changed = str(part.get("model_type")), dict(part)
    if kind == "exaone4" and isinstance(part.get("sliding_window_pattern"), int):
        del changed["sliding_window_pattern"]  # mlx-lm reads this pattern as letters
    if kind == "granitemoehybrid":
        kinds = part.get("layer_types") or ()
        changed["layer_types"] = [_LAYERS.get(name, name) for name in kinds]
    own = OF_TYPE[kind](part) if kind in OF_TYPE else {}
    changed |= {name: value for name, value in own.items() if changed.get(name) is None}
    lacking = (name for name in DERIVED if name in names and changed.get(name) is None)
    derived = {name: DERIVED[name](changed) for name in lacking}
    return changed | {name: value for name, value in derived.items() if value is not None}


TENSOR_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "mimo_v2_flash": ((r"\.self_attn\.sinks$", ".self_attn.attention_sink_bias"),),
    "nanochat": (
        (r"^model\.embed_tokens\.", "transformer.wte."),
        (r"^model\.layers\.", "transformer.h."),
        (r"\.self_attn\.o_proj\.", ".attn.c_proj."),
        (r"\.self_attn\.([qkv])_proj\.", r".attn.c_\1."),
        (r"\.mlp\.fc1\.", ".mlp.c_fc."),
        (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    ),
    "olmo_hybrid": (
        (r"\.attention_layer_norm\.", ".input_layernorm."),
        (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    ),
    "gpt2": ((r"^transformer\.", ""),),
    "llama4_text": ((r"^", "language_model."),),
    "gemma3n_text": ((r"^model\.", "model.language_model."),),
}
"""Type -> patterns in the names of tensors, and what replaces them."""
EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.((?:gate|up|down)_proj\.(?:weight|scales|biases))")
STACKED = ("qwen3_5_moe", "qwen3_5_moe_text")
"""Types whose experts mlx-lm expects in one tensor, and transformers saves one by one."""


def renamed(kind: object, tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors of a checkpoint by the names that the family of mlx-lm reads."""
    result = dict(tensors)
    for pattern, new in TENSOR_NAMES.get(str(kind), ()):
        result = {re.sub(pattern, new, name): array for name, array in result.items()}
    if kind in STACKED:
        result = stacked(result)
    if kind == "gpt_oss":
        result = dict(_turned(name, array) for name, array in result.items())
    return result


def stacked(tensors: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Join the tensors of single experts to one tensor, (experts, output, input)."""
    result, experts = {}, dict[str, dict[int, mx.array]]()
    for name, array in tensors.items():
        if found := EXPERT.fullmatch(name):
            joined = f"{found[1]}.switch_mlp.{found[3]}"
            experts.setdefault(joined, {})[int(found[2])] = array
        else:
            result[name] = array
    for name, arrays in experts.items():
        result[name] = mx.stack([arrays[number] for number in sorted(arrays)])
    return result


def _turned(name: str, array: mx.array) -> tuple[str, mx.array]:
    """Turn the unquantized experts of gpt-oss, (experts, input, output), as mlx-lm reads them."""
    if re.search(r"\.experts\.(gate_up|down)_proj$", name):
        return f"{name}.weight", array.swapaxes(-1, -2)
    return name, array


SYNONYMS = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
"""Name of an activation -> another name of the same function."""
SLIDING_WINDOW = "sliding_window"
WINDOW_KEYS = (SLIDING_WINDOW, "use_sliding_window", "max_window_layers")
"""Keys that only matter if a layer slides."""


@cache
def _table() -> dict[str, dict[str, Any]]:
    return json.loads(files(__package__).joinpath("settings.json").read_text("utf-8"))


def check_read(config: Part, arguments: type) -> None:
    """Raise CheckpointError if config.json sets a key that the network does not read to a value
    that is not neutral. Sliding windows are allowed; `window` deals with them.

    Args:
        arguments: The class of mlx-lm that holds the family's arguments."""
    for key, value in _unread(config, arguments):
        if key not in WINDOW_KEYS:
            raise CheckpointError(
                f"config.json sets {key} to {value!a:.40}, which mlx-lm ignores for models of type "
                f"{config.get('model_type')}: the output would be wrong. Update mlx-lm"
            )


def window(config: Part, arguments: type) -> int | None:
    """Return the window of a model whose network attends to all tokens although config.json wants
    a window, or None. Sequences up to this length are computed right."""
    unread = dict(_unread(config, arguments))
    part = text_config(config)
    size, kinds = unread.get(SLIDING_WINDOW), part.get("layer_types")
    slides = part.get("use_sliding_window", True) and (not kinds or SLIDING_ATTENTION in kinds)
    reached = isinstance(size, int) and 0 < size < part.get("max_position_embeddings", sys.maxsize)
    return size if slides and reached else None


def _unread(config: Part, arguments: type) -> Iterator[tuple[str, Any]]:
    """Yield each key that is set to a value that is not neutral and that nobody reads."""
    part, table = text_config(config), _table()
    kind = str(config.get("model_type"))
    neutral = table.get(str(part.get("model_type", kind)), table.get(kind, {}))
    read = {*names_of(arguments), *mends.reads(part)}
    for key, default in neutral.items():
        value = part.get(key, default)
        if key not in read and _plain(value) != _plain(default):
            yield key, value


def _plain(value: Any) -> Any:
    """Return a value in one spelling: null, false and 0 are None, and activations have one name."""
    return SYNONYMS.get(value, value) if isinstance(value, str) else value or None
