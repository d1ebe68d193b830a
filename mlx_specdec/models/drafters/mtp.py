"""Layers for multi-token prediction, from a checkpoint of their own or from the target's. Such a
layer runs as a model of mlx-lm that has only this layer."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints import mtp_layers
from ...checkpoints.files import Weights, check_numbers
from ...checkpoints.mtp_layers import NUMBERED, QWEN, Carried
from ...checkpoints.tensors import check_weights
from ...errors import CheckpointError, first_line
from ..number_format import NumberFormat, evaluate
from .files import IN_16_BITS, UNUSED, ConfigEntries, DrafterFiles, LayerSizes, StoredTensors
from .layers import SourceKeysValues
from .network import Chain, ChainReading, Config, DrafterKind

PLAIN = "qwen3"
"""The family whose checkpoints carry no such layers. Only `speculators` trains them."""
MLX_LM_TYPES = {"qwen3_5_text": "qwen3_5", "qwen3_5_moe_text": "qwen3_5_moe"}
LAYER = "layers.0."
_PARTS = {
    **dict.fromkeys(("fc", "eh_proj", "input_proj"), "fc"),
    **dict.fromkeys(("norm", "shared_head.norm", "shared_head_norm", "final_layernorm"), "norm"),
    **dict.fromkeys(("pre_fc_norm_embedding", "enorm", "token_layernorm"), "pre_fc_norm_embedding"),
    **dict.fromkeys(("pre_fc_norm_hidden", "hnorm", "hidden_layernorm"), "pre_fc_norm_hidden"),
}
"""The families' names of the modules around the layer, and this module's names for them."""
_SHARED = ("embed_tokens", "shared_head.head", "lm_head")
"""Matrices of the target. Some files contain copies of them, quantized or not."""
_BEFORE = re.compile(
    r"(?:(?:language_)?model\.)*(?:mtp\.layers|mtp_layers|layers)\.(\d+)\."
    r"|.*mtp\.|model\.mtp_block\.|model\."
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
"""Settings that make a model of one attention layer, with experts if the family has them."""
_OF_OTHER_LAYERS = ("layer_types", "quantization", "quantization_config", "text_config")


@dataclass(frozen=True, kw_only=True)
class MtpFiles(DrafterFiles):
    """A layer for multi-token prediction in a checkpoint.

    Attributes:
        block: The configuration of mlx-lm's model that has only this layer.
        renamed: Whether the layer's tensors already have mlx-lm's names.
    """

    block: Mapping[str, Any]
    renamed: bool


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return whether all tensors belong to layers for multi-token prediction."""
    return bool(names) and all(map(mtp_layers.known(config), names))


def read(directory: Path, config: Config, weights: Weights | None) -> MtpFiles:
    assert weights is not None, "config.json alone does not describe the layer"
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        original = not mtp_layers.is_split(config) and mtp_layers.is_original(weights)
        carried = Carried(tuple(weights.infos), weights.read, original)
        return _files(directory, config, carried)
    family = mtp_layers.family(inner)
    kind = MLX_LM_TYPES.get(family, family)
    if kind not in (supported := (PLAIN, "qwen3_5", "qwen3_5_moe", "qwen3_next")):
        raise CheckpointError(
            f"{directory} holds a layer for multi-token prediction of the type {family!a:.60}, "
            f"which is not supported: {', '.join(supported)} are"
        )
    from transformers import AutoConfig  # mlx-lm imports transformers as well

    stated = {key: value for key, value in inner.items() if value is not None}
    text = kind if f"{kind}_text" not in MLX_LM_TYPES else f"{kind}_text"
    # `speculators` omits entries that have transformers' default values.
    complete = AutoConfig.for_model(**{**stated, "model_type": text}).to_dict()
    # Norms of Qwen 3 are stored as they are. Other families store their distance from 1.
    carried = Carried(tuple(weights.infos), weights.read, family != PLAIN)
    return _files(directory, complete, carried)


def of_target(directory: Path, config: Config) -> MtpFiles | None:
    """Open the layers in a target's checkpoint, or return None if it carries none. Raises
    CheckpointError if they are damaged or not supported."""
    carried = mtp_layers.carried(directory, config)
    if carried is not None:
        try:
            return _files(directory, config, carried)
        except (KeyError, TypeError, ValueError) as problem:
            raise CheckpointError(
                f"{directory} has layers for multi-token prediction that do not fit together "
                f"({type(problem).__name__}: {first_line(problem):.100}): download it again"
            ) from problem
    if mtp_layers.foreign(directory, config):
        raise CheckpointError(
            f"layers for multi-token prediction of the type {mtp_layers.family(config)!a:.60} are "
            f"not supported: those of {', '.join(sorted(NUMBERED | QWEN - set(MLX_LM_TYPES)))} are"
        )
    return None


def _files(directory: Path, config: Config, carried: Carried) -> MtpFiles:
    text, family = mtp_layers.text_config(config), mtp_layers.family(config)
    if text.get("mtp_use_dedicated_embeddings"):
        raise CheckpointError(
            f"{directory} has an embedding of its own for multi-token prediction, which is not "
            "supported"
        )
    tensors = _own_names(directory, carried)
    if family not in NUMBERED:
        centered = carried.original and family in QWEN
        tensors = _as_mlx_lm(tensors, zero_centered=centered)
    block = _block(text, family, experts=any(".mlp.gate." in name for name in tensors))
    check_numbers(directory, block, len(tensors))
    settings = ConfigEntries(directory / "config.json", block)
    width = int(settings["hidden_size"])
    return MtpFiles(
        directory=directory,
        kind="mtp",
        settings=settings,
        sizes=LayerSizes(width, float(settings.get("rms_norm_eps", 1e-6))),
        tapped=None,
        target_width=width,
        vocabulary=int(settings["vocab_size"]),
        tensors=StoredTensors.made(directory, tensors),
        block=block,
        renamed=family not in NUMBERED,
    )


def _own_names(directory: Path, carried: Carried) -> dict[str, mx.array]:
    """Return the tensors by this package's names: `fc`, the norms around the layer, and the layer's
    tensors in `layers.0`."""
    numbers, tensors = set(), {}
    for name in carried.names:
        before = _BEFORE.match(name)
        rest = name if before is None else name[before.end() :]
        path, _, kind = rest.rpartition(".")
        if path in _SHARED or rest in UNUSED:
            continue
        if before is not None and before[1] is not None:
            numbers.add(before[1])
        key = f"{_PARTS[path]}.{kind}" if path in _PARTS else LAYER + rest
        tensors[key] = carried.read(name)
    if len(numbers) > 1:
        raise CheckpointError(
            f"{directory} has {len(numbers)} layers for multi-token prediction: one is supported, "
            "from which several tokens are drafted"
        )
    return tensors


def _as_mlx_lm(tensors: dict[str, mx.array], *, zero_centered: bool) -> dict[str, mx.array]:
    """Convert Qwen's tensors to mlx-lm's layout: all experts in one tensor, and norms around 1."""
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
    apart: dict[str, dict[int, mx.array]] = {}
    for name in list(tensors):
        if match := _EXPERT.fullmatch(name):
            apart.setdefault(match[3], {})[int(match[2])] = tensors.pop(name)
    for part, experts in apart.items():
        rows = [experts[number] for number in range(len(experts))]
        tensors[f"{_SWITCH}{part}.weight"] = mx.stack(rows)
    return tensors


def _block(text: Mapping[str, Any], family: str, *, experts: bool) -> dict[str, Any]:
    kind = MLX_LM_TYPES.get(family, family)
    block = {**text, **_ALONE, "model_type": kind}
    if not experts:
        block |= {"num_experts": 0, "n_routed_experts": None}
    return {key: value for key, value in block.items() if key not in _OF_OTHER_LAYERS}


class Mtp(Chain):
    """The network of a layer for multi-token prediction. mlx-lm runs it as a model of one layer."""

    def __init__(self, files: MtpFiles) -> None:
        # Imported here, because T5 targets also import the drafters and must not import mlx-lm.
        from ..mlx_lm.family import network_of

        super().__init__(files)
        self.pre_fc_norm_embedding = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        model: Any = network_of(files.block, str(files.directory))
        self._renamed = model.sanitize
        self._own_bits = getattr(model, "quant_predicate", None)
        self.cast_predicate = getattr(model, "cast_predicate", lambda path: True)
        self.block = model.model
        # The target has the embedding, and the drafter a norm of its own.
        self.block.embed_tokens = self.block.norm = nn.Identity()

    def open(self) -> ChainReading:
        from ..mlx_lm.caches import BatchedCache

        return ChainReading(self, 1, BatchedCache)

    def step(
        self,
        tokens: mx.array,
        states: mx.array,
        caches: list[Any],
        offset: int,
        sources: Sequence[SourceKeysValues | None] = (),
    ) -> tuple[mx.array, mx.array]:
        """See `Chain.step`. The layer ignores `sources`."""
        embedded = self.pre_fc_norm_embedding(self.embed(tokens))
        both = mx.concatenate([embedded, self.pre_fc_norm_hidden(states)], axis=-1)
        normed = self.norm(self.block(self.fc(both), cache=caches))
        return normed, normed

    def load(self, files: DrafterFiles, numbers: NumberFormat) -> None:
        from mlx_lm.utils import infer_quant_config

        from ..mlx_lm import latent
        from ..mlx_lm.attention import replace_in
        from ..mlx_lm.loader import cannot_build
        from ..mlx_lm.loading import with_numbers

        assert isinstance(files, MtpFiles)

        def stored_bits(path: str, module: nn.Module) -> Any:
            able = hasattr(module, "to_quantized") and f"{path}.scales" in weights
            return able and infer_quant_config(path, module, weights)

        try:
            weights = self._as_mlx_lm(files)
            nn.quantize(self, class_predicate=stored_bits)
            shapes = {name: array.shape for name, array in tree_flatten(self.parameters())}
            check_weights(shapes, {name: array.shape for name, array in weights.items()})
            self.load_weights(list(weights.items()))
            # Building a pass raises if mlx-lm cannot run the configuration.
            width = files.sizes.width
            self.open().read(mx.zeros((1, 2, width)), mx.zeros((1, 2), dtype=mx.int32))
        except CheckpointError as problem:
            raise CheckpointError(f"{files.directory}: {problem}") from None
        except Exception as problem:  # mlx-lm's classes do not check, and may raise anything
            raise CheckpointError(f"{files.directory}: {cannot_build(problem)}") from problem
        with_numbers(self, str(files.directory), numbers)
        evaluate(self)
        # After a round the layer reads several rows at once. It needs no trial of its own: the
        # target's layers were tried, and a wrong draft token does not change the output.
        replace_in(self.block)
        latent.intercept(latent.expanding(self.block))

    def quant_predicate(self, path: str, module: nn.Module) -> Any:
        return path not in IN_16_BITS and (self._own_bits is None or self._own_bits(path, module))

    def _as_mlx_lm(self, files: MtpFiles) -> dict[str, mx.array]:
        """Return the tensors by this network's names. mlx-lm's `sanitize` converts the layer's
        tensors as those of a model's first layer."""
        weights = {name: files.tensors[name] for name in files.tensors if LAYER not in name}
        layer = {f"model.{name}": files.tensors[name] for name in files.tensors if LAYER in name}
        renamed = layer if files.renamed else self._renamed(layer)
        return weights | {
            name.replace("model.", "block.", 1): array for name, array in renamed.items()
        }


MTP = DrafterKind(
    "mtp",
    recognizes,
    read,
    Mtp,
    described=False,
    missing="there is no such drafter to propose: the checkpoint carries no layers for multi-token "
    "prediction, which mlx-lm's conversions drop and draft-model mtp fetches, or another drafter "
    "was named with draft-model",
)
