"""Files of layers for multi-token prediction, in a checkpoint of their own or in the target's.
mlx-lm builds each layer as a model of one layer, which needs other names and a configuration."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...checkpoints.files import Weights, check_numbers, text_config
from ...errors import CheckpointError, first_line
from . import mtp_layers
from .files import UNUSED, ConfigEntries, DrafterFiles, LayerSizes, StoredTensors
from .mtp_layers import CENTERED, MTP_FAMILIES
from .network import Config

WITHOUT_LAYERS = "qwen3"
"""A family whose own checkpoints carry no such layers. Only `speculators` trains layers for it."""
MLX_LM_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
LAYER = "layers.0."
_MODULES = {
    **dict.fromkeys(("fc", "eh_proj", "input_proj", "linear_proj"), "fc"),
    **dict.fromkeys(("shared_head.norm", "shared_head_norm", "final_layernorm"), "norm"),
    **dict.fromkeys(("enorm", "token_layernorm", "emb_norm"), "pre_fc_norm_embedding"),
    **dict.fromkeys(("hnorm", "hidden_layernorm", "hidden_norm"), "pre_fc_norm_hidden"),
    **{name: name for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")},
    "shared_head.output": "lm_head",
}
"""The families' names of the modules around the layer, and this module's names for them."""
_NAME_BEGINNING = re.compile(
    r"(?:(?:language_)?model\.)*(?:mtp\.layers|mtp_layers|layers)\.(\d+)\."
    r"|.*mtp\.|model\.mtp_block\.|model\."
)
_ERNIE_NAME = re.compile(r"model\.mtp_(?:block|(emb_norm|hidden_norm|linear_proj))\.(\d+)\.(.*)")
_GATE_UP, _DOWN = (f"{LAYER}mlp.experts.{part}_proj" for part in ("gate_up", "down"))
_SWITCH = f"{LAYER}mlp.switch_mlp."
_ALONE: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_layers_enum": None,
    "moe_layer_start_index": 0,
    "moe_layer_end_index": 0,
    "moe_layer_interval": 1,
}
"""Settings that make a model of one attention layer, with experts if the family has them."""
_OF_OTHER_LAYERS = ("layer_types", "quantization", "quantization_config", "text_config")
_PER_LAYER = (
    *("layer_types", "rope_theta", "partial_rotary_factors"),
    *("swiglu_limits", "swiglu_limits_shared"),
)
"""Entries with a value for each layer, the additional layers included."""


HIDDEN_FIRST = ("mimo",)
"""Families in which the hidden state comes before the token's embedding when the two are joined to
one input of the layer's projection `fc`. In all other families the embedding comes first."""
RENAMED = CENTERED | {WITHOUT_LAYERS}
"""Families whose tensors get mlx-lm's names here, and not by mlx-lm's `sanitize`."""
RAW = ("step3p5", "ernie4_5", "ernie4_5_moe")
"""Families whose layers read the output of the target's last layer, or of the layer before them,
without the norm that follows that output."""


@dataclass(frozen=True, kw_only=True)
class MtpFiles(DrafterFiles):
    """A layer for multi-token prediction in a checkpoint.

    Attributes:
        block: The configuration of mlx-lm's model that has only this layer.
        later: The layers that draft the tokens after this layer's, in their order.
    """

    block: Mapping[str, Any]
    later: tuple["MtpFiles", ...] = ()


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return whether all tensors belong to layers for multi-token prediction."""
    return bool(names) and all(map(mtp_layers.known(config), names))


def read(kind: str, directory: Path, config: Config, weights: Weights | None) -> MtpFiles:
    assert weights is not None, "config.json alone does not describe the layer"
    tensors = mtp_layers.without_copies(weights.infos, weights.read)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        return _files(directory, config, tensors, mtp_layers.is_original(weights, config))
    family = mtp_layers.family(inner)
    stored = MLX_LM_TYPES.get(family, family)
    if stored not in (supported := (WITHOUT_LAYERS, "qwen3_5", "qwen3_5_moe", "qwen3_next")):
        raise CheckpointError(
            f"{directory} holds a layer for multi-token prediction of the type {family!a:.60}, "
            f"which is not supported: {', '.join(supported)} are"
        )
    from transformers import AutoConfig  # mlx-lm imports transformers as well

    stated = {key: value for key, value in inner.items() if value is not None}
    text = stored if f"{stored}_text" not in MLX_LM_TYPES else f"{stored}_text"
    # `speculators` omits entries that have transformers' default values.
    complete = AutoConfig.for_model(**{**stated, "model_type": text}).to_dict()
    # Norms of Qwen 3 are stored as they are. Other families store their distance from 1.
    return _files(directory, complete, tensors, family != WITHOUT_LAYERS)


def of_target(directory: Path, config: Config) -> MtpFiles | None:
    """Open the layers in a target's checkpoint, or return None if it carries none. Raises
    CheckpointError if they are damaged or not supported."""
    carried = mtp_layers.carried(directory, config)
    if carried is not None:
        try:
            return _files(directory, config, *carried)
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"{directory} has layers for multi-token prediction that do not fit together "
                f"({type(problem).__name__}: {first_line(problem):.100}): download it again"
            ) from problem
    if mtp_layers.foreign(directory, config):
        raise CheckpointError(
            f"layers for multi-token prediction of the type {mtp_layers.family(config)!a:.60} are "
            f"not supported: those of {', '.join(sorted(MTP_FAMILIES))} are"
        )
    return None


def _files(
    directory: Path, config: Config, arrays: Mapping[str, mx.array], original: bool
) -> MtpFiles:
    """Open layers. original: Whether they have the layout of the model's authors."""
    text, family = text_config(config), mtp_layers.family(config)
    if text.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{directory} has an embedding of its own for multi-token prediction, which is not "
            "supported"
        )
    made = []
    for depth, tensors in enumerate(_own_names(arrays, family)):
        if family in RENAMED:
            centered = original and family in CENTERED
            tensors = _in_mlx_lm_layout(tensors, zero_centered=centered)
        experts = any(".gate." in name for name in tensors)
        block = _block(text, family, depth, experts=experts)
        check_numbers(directory, block, len(tensors))
        settings = ConfigEntries(directory / "config.json", block)
        width = int(settings["hidden_size"])
        eps = settings.get("rms_norm_eps", settings.get("layer_norm_epsilon", 1e-6))
        stored = StoredTensors(directory)
        stored.update({name: partial(tensors.__getitem__, name) for name in tensors})
        files = MtpFiles(
            directory=directory,
            kind="mtp",
            settings=settings,
            sizes=LayerSizes(width, float(eps)),
            hidden_layers=None,
            target_width=width,
            vocabulary=int(settings["vocab_size"]),
            tensors=stored,
            block=block,
        )
        made.append(files)
    return replace(made[0], later=tuple(made[1:]))


def _own_names(arrays: Mapping[str, mx.array], family: str) -> list[dict[str, mx.array]]:
    """Return the tensors of each layer by this module's names: `fc`, the norms around the layer,
    and the layer's tensors in `layers.0`. All layers share the tensors whose names have no number.
    For Nemotron-H, the numbered layers are parts of a single layer and keep their numbers."""
    apart: dict[int, dict[str, mx.array]] = {}
    shared: dict[str, mx.array] = {}
    for name, array in arrays.items():
        plain = name.replace(".transformer.", ".")
        if (ernie := _ERNIE_NAME.fullmatch(plain)) is not None:
            part, number, rest = ernie.groups(default="")
            plain = f"mtp.layers.{number}.{part}{'.' if part else ''}{rest}"
        before = _NAME_BEGINNING.match(plain)
        rest = plain if before is None else plain[before.end() :]
        if rest in UNUSED:
            continue
        path, _, kind = rest.rpartition(".")
        layer_number: str | None = None if before is None else before[1]
        if path in _MODULES:
            key = f"{_MODULES[path]}.{kind}"
        elif path == "norm" and layer_number is None:
            key = rest
        elif family == "nemotron_h" and layer_number is not None:
            key, layer_number = f"layers.{layer_number}.{rest}", None
        else:
            key = LAYER + rest
        shares = layer_number is None or family == "nemotron_h"
        layer = shared if shares else apart.setdefault(int(layer_number or 0), {})
        layer[key] = array
    return [{**shared, **apart[number]} for number in sorted(apart)] or [shared]


def _in_mlx_lm_layout(tensors: dict[str, mx.array], *, zero_centered: bool) -> dict[str, mx.array]:
    """Convert the tensors of Qwen or Step 3.5 to mlx-lm's layout, in which one tensor holds all
    experts, and norms are around 1."""
    from ..mlx_lm.spellings import stacked

    if zero_centered:
        tensors = {
            name: array + 1 if name.endswith("norm.weight") or "pre_fc_norm" in name else array
            for name, array in tensors.items()
        }
    if _GATE_UP in tensors:
        gate, up = mx.split(tensors.pop(_GATE_UP), 2, axis=-2)
        tensors |= {f"{_SWITCH}gate_proj.weight": gate, f"{_SWITCH}up_proj.weight": up}
    if _DOWN in tensors:
        tensors[f"{_SWITCH}down_proj.weight"] = tensors.pop(_DOWN)
    return stacked(tensors)


def _block(text: Mapping[str, Any], family: str, depth: int, *, experts: bool) -> dict[str, Any]:
    """Return the configuration of mlx-lm's model for the layer `depth`, counted from 0."""
    kind, number = MLX_LM_TYPES.get(family, family), text.get("num_hidden_layers", 0) + depth
    block = {key: value for key, value in text.items() if key not in _OF_OTHER_LAYERS}
    block |= {**_ALONE, "model_type": kind}
    for key in _PER_LAYER:
        if isinstance(values := text.get(key), list) and len(values) > number:
            block[key] = [values[number]]
    if not experts:
        block |= {"num_experts": 0, "n_routed_experts": None, "moe_layer_start_index": 1}
    if family == "nemotron_h":
        kinds = text.get("mtp_layers_block_type") or ["attention", "moe"]
        pattern = text.get("mtp_hybrid_override_pattern")
        block["layers_block_type"] = None if pattern else list(kinds)
        block["hybrid_override_pattern"] = list(pattern) if pattern else None
        block["num_hidden_layers"] = len(pattern or kinds)
    return block
