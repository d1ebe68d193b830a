"""Layers for multi-token prediction: those that a target's own checkpoint carries, the same in a
directory of their own, and those that `speculators` writes.

Source: the files of Qwen3-Next, Qwen3.5, DeepSeek-V3 (arXiv 2412.19437, section 2.2) and GLM-4.5,
and what mlx-lm calls the tensors of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError, first_line
from .. import mtp_layers
from ..configuration import check_numbers
from ..files import Weights
from ..mtp_layers import NUMBERED, QWEN, Carried
from .layout import SpeculatorFiles
from .mtp_defaults import DEFAULTS, PLAIN
from .settings import Settings
from .sizes import Sizes
from .stored import UNREAD, StoredTensors

MLX_LM_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
LAYER = "layers.0."
_PARTS = {
    **dict.fromkeys(("fc", "eh_proj", "input_proj"), "fc"),
    **dict.fromkeys(("norm", "shared_head.norm", "final_layernorm"), "norm"),
    **dict.fromkeys(("pre_fc_norm_embedding", "enorm", "token_layernorm"), "pre_fc_norm_embedding"),
    **dict.fromkeys(("pre_fc_norm_hidden", "hnorm", "hidden_layernorm"), "pre_fc_norm_hidden"),
}
"""What the families call what stands around the layer."""
_LENT = ("embed_tokens.weight", "shared_head.head.weight", "lm_head.weight")
"""The target's own, which some files repeat."""
_BEFORE = re.compile(
    r"(?:(?:language_)?model\.)*(?:mtp\.layers|mtp_layers|layers)\.(\d+)\.|.*mtp\."
)
_EXPERT = re.compile(r"(layers\.0\.mlp)\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")
_GATE_UP, _DOWN = (f"{LAYER}mlp.experts.{part}_proj" for part in ("gate_up", "down"))
_SWITCH = f"{LAYER}mlp.switch_mlp."
_ALONE: Mapping[str, Any] = {
    "num_hidden_layers": 1,
    "full_attention_interval": 1,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""What makes a model of one layer that attends, and has experts where the family has them."""
_OF_OTHER_LAYERS = ("layer_types", "quantization", "quantization_config", "text_config")


@dataclass(frozen=True)
class MtpFiles(SpeculatorFiles):
    """block: the configuration of a model of this one layer, as mlx-lm reads it. renamed: the
    layer's tensors have mlx-lm's names already."""

    block: Mapping[str, Any]
    renamed: bool

    @property
    def inputs(self) -> int:
        """A token's embedding beside the hidden state before it."""
        return 2 * self.target_width


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether these are layers for multi-token prediction and nothing else."""
    return bool(names) and all(map(mtp_layers.known(config), names))


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> MtpFiles:
    """See `speculators.read`."""
    weights = Weights(directory)
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        carried = Carried(tuple(weights.infos), weights.read, mtp_layers.is_original(weights))
        return _files(directory, config, carried)
    family = mtp_layers.family(inner)
    default = DEFAULTS.get(MLX_LM_TYPES.get(family, family))
    if default is None:
        raise CheckpointError(
            f"{directory} holds a layer for multi-token prediction of the type {family!a:.60}, "
            f"which is not supported: {', '.join(sorted(DEFAULTS))} are"
        )
    said = {key: value for key, value in inner.items() if value is not None}
    # transformers stores the norms of Qwen 3 whole.
    carried = Carried(tuple(weights.infos), weights.read, family != PLAIN)
    return _files(directory, {**default, **said}, carried)


def of_target(directory: Path, config: Mapping[str, Any]) -> MtpFiles | None:
    """The layers that a target's own checkpoint carries; None for none. config: of the target.
    Raises CheckpointError for some that are damaged or cannot be used."""
    carried = mtp_layers.carried(directory, config)
    if carried is not None:
        return _files(directory, config, carried)
    if mtp_layers.foreign(directory, config):
        raise CheckpointError(
            f"layers for multi-token prediction of the type {mtp_layers.family(config)!a:.60} are "
            f"not supported: those of {', '.join(sorted(NUMBERED | QWEN - set(MLX_LM_TYPES)))} are"
        )
    return None


def _files(directory: Path, config: Mapping[str, Any], carried: Carried) -> MtpFiles:
    text, family = mtp_layers.text_config(config), mtp_layers.family(config)
    if text.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{directory} has an embedding of its own for multi-token prediction, which is not "
            "supported"
        )
    tensors = _own_names(directory, carried)
    if family not in NUMBERED:
        centered = carried.original and family in QWEN
        try:
            tensors = _as_mlx_lm(directory, tensors, zero_centered=centered)
        except ValueError as problem:
            raise CheckpointError(
                f"{directory} has experts for multi-token prediction that do not fit together "
                f"({first_line(problem):.100}): download it again"
            ) from problem
    block = _block(text, family, experts=any(".mlp.gate." in name for name in tensors))
    check_numbers(directory, block, len(tensors))
    settings = Settings(directory / "config.json", block)
    width = settings.whole("hidden_size")
    return MtpFiles(
        directory=directory,
        kind="mtp",
        sizes=Sizes(width, settings.above_zero("rms_norm_eps", 1e-6)),
        tapped=None,
        taps=0,
        target_width=width,
        vocabulary=settings.whole("vocab_size"),
        target_ids=None,
        tensors=StoredTensors.made(directory, tensors),
        block=block,
        renamed=family not in NUMBERED,
    )


def _own_names(directory: Path, carried: Carried) -> dict[str, mx.array]:
    """The tensors of one layer, `fc`, the norms around it, and the rest under `layers.0`."""
    numbers, tensors = set(), {}
    for name in carried.names:
        before = _BEFORE.match(name)
        rest = name if before is None else name[before.end() :]
        if rest in (*_LENT, *UNREAD):
            continue
        if before is not None and before[1] is not None:
            numbers.add(before[1])
        path, _, kind = rest.rpartition(".")
        own = f"{_PARTS[path]}.{kind}" if path in _PARTS else LAYER + rest
        tensors[own] = carried.read(name)
    if len(numbers) > 1:
        raise CheckpointError(
            f"{directory} has {len(numbers)} layers for multi-token prediction: one is supported, "
            "from which several tokens are drafted"
        )
    return tensors


def _as_mlx_lm(
    directory: Path, tensors: dict[str, mx.array], *, zero_centered: bool
) -> dict[str, mx.array]:
    """Of Qwen's: experts joined in one tensor, as mlx-lm names them, and norms around 1."""
    if zero_centered:
        tensors = {
            name: array + 1 if name.endswith("norm.weight") or "pre_fc_norm" in name else array
            for name, array in tensors.items()
        }
    if _GATE_UP in tensors:
        both = tensors.pop(_GATE_UP)
        gate, up = mx.split(both, 2, axis=-2)
        tensors |= {f"{_SWITCH}gate_proj.weight": gate, f"{_SWITCH}up_proj.weight": up}
    if _DOWN in tensors:
        tensors[f"{_SWITCH}down_proj.weight"] = tensors.pop(_DOWN)
    apart: dict[str, dict[int, mx.array]] = {}
    for name in list(tensors):
        if match := _EXPERT.fullmatch(name):
            apart.setdefault(match[3], {})[int(match[2])] = tensors.pop(name)
    for part, experts in apart.items():
        numbers = range(len(experts))
        if missing := {*numbers} - {*experts}:
            raise CheckpointError(
                f"{directory} lacks {part} of expert {min(missing)} for multi-token prediction: "
                "download it again"
            )
        tensors[f"{_SWITCH}{part}.weight"] = mx.stack([experts[number] for number in numbers])
    return tensors


def _block(text: Mapping[str, Any], family: str, *, experts: bool) -> dict[str, Any]:
    """The configuration of a model of this layer alone."""
    kind = MLX_LM_TYPES.get(family, family)
    block = {**text, **_rotation(text, kind), **_ALONE, "model_type": kind}
    if not experts:
        block |= {"num_experts": 0, "n_routed_experts": None}
    return {key: value for key, value in block.items() if key not in _OF_OTHER_LAYERS}


def _rotation(text: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Of positions, which newer configurations describe in one place, and mlx-lm reads where older
    ones do."""
    stated = text.get("rope_parameters")
    if kind not in (PLAIN, "qwen3_next") or not isinstance(stated, Mapping):
        return {}
    flat = {key: stated[key] for key in ("rope_theta", "partial_rotary_factor") if key in stated}
    if stated.get("rope_type", "default") != "default":
        flat["rope_scaling"] = dict(stated)
    return flat
