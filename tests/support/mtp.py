"""Tiny targets with a layer for multi-token prediction, in the layout of their makers. Experts are
separate, keys and values are one matrix, and Qwen's norms are around 0."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from . import tiny
from .speculators import random

CONFIGS: Mapping[str, dict[str, Any]] = tiny.complete(tiny.DATA["mtp"])
_CENTERED = (
    *("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"),
    *("q_norm.weight", "k_norm.weight"),
)


def write(
    family: str,
    directory: Path,
    *,
    original: bool = True,
    layer: bool = True,
    vocabulary: int = tiny.VOCABULARY,
    extra: Mapping[str, mx.array] | None = None,
    drop: str | None = None,
    **changes: Any,
) -> Path:
    """Write a target's directory, with the same weights in every layout.

    Args:
        original: Whether the layout is the makers' own instead of an MLX program's.
        layer: Whether there is a layer for multi-token prediction.
        extra: Additional tensors.
        drop: A tensor to leave out.
        changes: Changed entries of config.json.
    """
    config = json.loads(json.dumps({**CONFIGS[family], **changes}))
    config.get("text_config", config)["vocab_size"] = vocabulary
    weights = dict(tree_flatten(tiny.from_config(config).parameters()))
    if layer:
        weights |= layer_of(family, config)
    if original:
        weights = as_original(family, weights, config)
    weights |= extra or {}
    weights.pop(drop or "", None)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layout = {"format": "pt" if original else "mlx"}
    stored = {name: mx.contiguous(array) for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), stored, layout)
    return directory


def split(
    family: str, directory: Path, *, vocabulary: int = tiny.VOCABULARY, bits: int | None = None
) -> Path:
    """Write a folder of the layer alone as mlx-vlm does. bits: of quantized matrices."""
    config = json.loads(json.dumps(CONFIGS[family]))
    text = config.get("text_config", config)
    text["vocab_size"] = vocabulary
    name = "qwen3_5" if family.startswith("qwen") else family
    outer: dict[str, Any] = {"model_type": f"{name}_mtp", "text_config": text, "block_size": 3}
    weights: dict[str, mx.array] = {}
    table = mx.zeros((text["vocab_size"], text["hidden_size"]), mx.bfloat16)
    if not family.startswith("qwen"):
        weights |= {"model.embed_tokens.weight": table, "lm_head.weight": table}
    for name, array in layer_of(family, config).items():
        name = name.removeprefix("mtp.").removeprefix(f"model.layers.{text['num_hidden_layers']}.")
        if family == "glm_moe_dsa":
            name = f"mtp.{name.replace('shared_head.norm', 'shared_head_norm')}"
        elif not family.startswith("qwen"):
            around = name.startswith(("enorm", "hnorm", "eh_proj", "shared_head.norm"))
            inside = name.replace("shared_head.norm", "shared_head_norm")
            name = f"model.{inside}" if around else f"model.mtp_block.{name}"
        weights[name] = array
    if bits is not None:
        outer["quantization"] = {"bits": bits, "group_size": 32, "mode": "affine"}
        for name, array in list(weights.items()):
            if array.ndim > 1 and array.shape[-1] % 32 == 0 and not name.endswith("gate.weight"):
                parts = mx.quantize(array, 32, bits)
                for part, value in zip(("weight", "scales", "biases"), parts, strict=True):
                    weights[f"{name.removesuffix('.weight')}.{part}"] = value
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    stored = {name: mx.contiguous(array) for name, array in weights.items()}
    mx.save_safetensors(str(directory / "model.safetensors"), stored, {"format": "mlx"})
    return directory


def layer_of(family: str, config: Mapping[str, Any]) -> dict[str, mx.array]:
    """A layer as mlx-lm would name its parts, and what stands around it. It is the last one of
    another model of the same sizes, which attends and has experts."""
    text = config.get("text_config", config)
    width, depth = text["hidden_size"], text["num_hidden_layers"]
    names = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    before = inside = "mtp."
    if not family.startswith("qwen"):
        names = ("eh_proj", "shared_head.norm", "enorm", "hnorm")
        before = inside = f"model.layers.{depth}."
    else:
        inside = "mtp.layers.0."
    shapes = {f"{before}{name}.weight": (width,) for name in names}
    around = random({**shapes, f"{before}{names[0]}.weight": (width, 2 * width)}, seed=4)
    layer = tree_flatten(tiny.from_config(dict(config), seed=9).layers[-1].parameters())
    return {**around, **{inside + name: array for name, array in layer}}


def as_original(
    family: str, weights: Mapping[str, mx.array], config: Mapping[str, Any]
) -> dict[str, mx.array]:
    """mlx-lm's tensors under the names and in the layout of the model's makers."""
    made: dict[str, mx.array] = {}
    fused: dict[str, dict[str, mx.array]] = {}
    for name, array in weights.items():
        name = re.sub(r"^language_model\.(model\.)?", r"\1language_model.", name)
        name = name.removeprefix("language_model.")
        if family.startswith("qwen") and (
            name.endswith(_CENTERED) or ("norm" in name and name.startswith("mtp."))
        ):
            array = array - 1
        if name.endswith("conv1d.weight"):
            array = array.moveaxis(2, 1)
        path, switch, part = name.partition(".switch_mlp.")
        if name.endswith((".embed_q.weight", ".unembed_out.weight")):
            path, _, part = name.removesuffix(".weight").rpartition(".")
            fused.setdefault(path, {})[part] = array
        elif switch and family == "qwen3_5_moe":
            fused.setdefault(path, {})[part] = array
        elif switch:
            made |= {f"{path}.experts.{n}.{part}": expert for n, expert in enumerate(array)}
        else:
            made[name] = array
    for path, parts in fused.items():
        made |= _fused(path, parts)
    return made


def _fused(path: str, parts: Mapping[str, mx.array]) -> dict[str, mx.array]:
    if "embed_q" in parts:
        both = mx.concatenate([parts["embed_q"].swapaxes(-1, -2), parts["unembed_out"]], axis=1)
        return {f"{path}.kv_b_proj.weight": both.reshape(-1, both.shape[-1])}
    gate, up = parts["gate_proj.weight"], parts["up_proj.weight"]
    return {
        f"{path}.experts.gate_up_proj": mx.concatenate([gate, up], axis=1),
        f"{path}.experts.down_proj": parts["down_proj.weight"],
    }
