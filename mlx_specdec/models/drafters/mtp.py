"""Layers for multi-token prediction, in a checkpoint of their own or in the target's. mlx-lm runs
each layer as a model of one layer, which needs other names of tensors and a configuration.

The first layer reads the target's hidden state of a token and the token after it, and predicts the
token after that. With several layers, layer k reads the output of layer k - 1 at the same position
and the token k positions later. Once the last layer has drafted a token, it drafts all
further tokens, and reads its previous output as the hidden state.

Source: arXiv 2412.19437, section 2.2 (DeepSeek-V3)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints.files import Weights, text_config
from ...checkpoints.tensors import check_weights
from ...errors import CheckpointError, first_line
from ...types import Reusable, after
from ..base import Base
from ..number_format import NumberFormat, evaluate
from ..rows import Rows
from . import mtp_layers
from .files import IN_16_BITS, UNUSED, ConfigEntries, DrafterFiles, LayerSizes, StoredTensors
from .mtp_layers import CENTERED
from .network import ChainContext, Config, DrafterContext, DrafterNetwork

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


def of_target(directory: Path, config: Config) -> MtpFiles | None:
    """Open the layers in a target's checkpoint, or return None if it carries none. Raises
    CheckpointError if they are damaged or not supported."""
    if (carried := mtp_layers.carried(directory, config)) is None:
        return None
    try:
        return _files(directory, config, *carried)
    except (KeyError, TypeError, ValueError) as problem:
        raise CheckpointError(
            f"{directory} has layers for multi-token prediction that do not fit together "
            f"({type(problem).__name__}: {first_line(problem):.100}): download it again"
        ) from problem


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


class Mtp(DrafterNetwork):
    """The network of a layer for multi-token prediction. The first layer's contains the later ones.

    Attributes:
        later: The networks of the later layers. If there are any, rows do not share passes.
    """

    described = False
    missing = (
        "there is no such drafter to propose: the checkpoint carries no layers for multi-token "
        "prediction, which mlx-lm's conversions drop and draft-model mtp fetches, or another "
        "drafter was named with draft-model"
    )

    @staticmethod
    def recognizes(config: Config, names: Collection[str]) -> bool:
        """Return whether all tensors belong to layers for multi-token prediction."""
        return bool(names) and all(map(mtp_layers.known(config), names))

    @staticmethod
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

    def __init__(self, files: MtpFiles) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        from ..mlx_lm.caches import BatchedCache, batched, leaves
        from ..mlx_lm.family import network_of
        from ..mlx_lm.network import inner_of

        self.normed = "norm.weight" in files.tensors
        super().__init__(files)
        family = files.block["model_type"]
        self._reads_raw, self._hidden_first = family in RAW, family == "mimo"
        self.pre_fc_norm_embedding = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(files.sizes.width, files.sizes.eps)
        model: Any = network_of(files.block, str(files.directory))
        self._renamed = model.sanitize
        self._own_bits = getattr(model, "quant_predicate", None)
        self.cast_predicate = getattr(model, "cast_predicate", lambda path: True)
        self.block: Any = inner_of(model)
        self._path = "backbone" if "backbone" in model else "model"
        self._makers = list(map(batched, make_prompt_cache(model)))
        if not all(isinstance(cache, BatchedCache) for cache in leaves(self.caches(Rows(1)))):
            raise CheckpointError(f"{files.directory}: a layer keeps a state that is not supported")
        # `step` embeds the tokens and applies the norm, so that the layer must do neither.
        for name in {"embed_tokens", "embeddings", "norm", "norm_f"} & self.block.keys():
            self.block[name] = nn.Identity()
        self.later = [Mtp(layer) for layer in files.later]
        self.batched = not self.later

    def bind(self, files: DrafterFiles, target: Base) -> None:
        from ..mlx_lm.network import inner_of

        assert isinstance(files, MtpFiles)
        super().bind(files, target)
        if self._reads_raw:
            self.hidden = (after(target.layers - 1),)
        # A function, because a module would count as a part of the drafter.
        norm = None if self.normed else inner_of(target.network).norm
        self._last = self.norm if norm is None else lambda states: norm(states)
        for layer, stored in zip(self.later, files.later, strict=True):
            layer.bind(stored, target)

    def open(self, count: int = 1) -> DrafterContext:
        return MtpContext(self, count)

    def caches(self, rows: Rows) -> list[Any]:
        return [make(rows) for make in self._makers]

    def cache_nbytes(self, source: int, positions: int) -> int:
        return (1 + len(self.later)) * super().cache_nbytes(source, positions)

    def step(
        self, tokens: mx.array, states: mx.array, caches: list[Any]
    ) -> tuple[mx.array, mx.array]:
        """See `ChainContext._step`."""
        both = [self.pre_fc_norm_embedding(self.embed(tokens)), self.pre_fc_norm_hidden(states)]
        if self._hidden_first:  # in the other families the embedding comes first
            both.reverse()
        # mlx-lm's Nemotron-H also reads the cache of a Mamba layer, which does not exist here.
        raw = self.block(self.fc(mx.concatenate(both, axis=-1)), cache=[*caches, None])
        normed = self._last(raw)
        return normed, raw if self._reads_raw else normed

    def load(self, files: DrafterFiles, numbers: NumberFormat) -> None:
        from ..mlx_lm.attention import expanding, intercept, replace_in
        from ..mlx_lm.family import with_numbers
        from ..mlx_lm.loader import cannot_build

        assert isinstance(files, MtpFiles)
        layers = [self, *self.later]
        try:
            for layer, stored in zip(layers, (files, *files.later), strict=True):
                layer.fill(stored)
            # Building a pass raises if mlx-lm cannot run the configuration.
            rows = 2 + len(self.later)
            context = self.open()
            context.add(mx.zeros((1, rows, files.sizes.width)), [rows])
            context.feed([[0] * rows])
        except CheckpointError as problem:
            raise CheckpointError(f"{files.directory}: {problem}") from None
        except Exception as problem:  # mlx-lm's classes do not check, and may raise anything
            raise CheckpointError(f"{files.directory}: {cannot_build(problem)}") from problem
        with_numbers(self, str(files.directory), numbers)
        evaluate(self)
        # After a round the layer reads several rows at once. It needs no trial of its own: the
        # target's layers were tried, and a wrong draft token does not change the output.
        for layer in layers:
            replace_in(layer.block)
            intercept(expanding(layer.block))

    def fill(self, files: MtpFiles) -> None:
        """Load the weights of this layer alone. Raises CheckpointError."""
        from mlx_lm.utils import infer_quant_config

        def stored_bits(path: str, module: nn.Module) -> Any:
            able = hasattr(module, "to_quantized") and f"{path}.scales" in weights
            return able and infer_quant_config(path, module, weights)

        # mlx-lm's `sanitize` converts tensors as if they belonged to a model's first layer.
        inside, prefix = re.compile(r"layers\.\d+\."), f"{self._path}."
        weights = {name: files.tensors[name] for name in files.tensors if not inside.match(name)}
        layer = {prefix + n: files.tensors[n] for n in files.tensors if inside.match(n)}
        renamed = layer if files.block["model_type"] in RENAMED else self._renamed(layer)
        weights |= {name.replace(prefix, "block.", 1): array for name, array in renamed.items()}
        nn.quantize(self, class_predicate=stored_bits)
        own = ((name, array) for name, array in tree_flatten(self.parameters()))
        shapes = {name: array.shape for name, array in own if not name.startswith("later.")}
        check_weights(shapes, {name: array.shape for name, array in weights.items()})
        self.load_weights(list(weights.items()), strict=False)  # without the later layers

    def quant_predicate(self, path: str, module: nn.Module) -> Any:
        path = re.sub(r"^later\.\d+\.", "", path)
        return path not in IN_16_BITS and (self._own_bits is None or self._own_bits(path, module))


class MtpContext(ChainContext):
    """The rows of a group in an Mtp; with later layers only one row. Positions are counted from the
    first that was processed.

    A later layer needs a later token, so that it has processed fewer positions. `_outputs` has, for
    each later layer, the output of the layer before it at the next position to process."""

    _network: Mtp
    _drafted: list[mx.array]

    def __init__(self, network: Mtp, count: int) -> None:
        from ..mlx_lm.caches import leaves

        super().__init__(network, count)
        self._caches = leaves(self._entries)
        self._later = [MtpContext(layer, 1) for layer in network.later]
        self._processed = [layer.lengths for layer in self._later]
        self._outputs: list[mx.array] = []

    def _process(
        self, hidden: mx.array, following: Sequence[Sequence[int]]
    ) -> tuple[mx.array, mx.array]:
        head, states = super()._process(hidden, following)
        outputs = states
        for number, layer in enumerate(self._later):
            if number < len(self._outputs):
                outputs = mx.concatenate([self._outputs[number], outputs], axis=1)
            self._outputs[number:] = [outputs[:, -1:], *self._outputs[number + 1 :]]
            outputs = outputs[:, :-1]
            if not (rows := outputs.shape[1]):
                break
            _, outputs = layer._step(layer._advance([following[0][-rows:]]), outputs)
        self._processed = [layer.lengths for layer in self._later]
        return head, states

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        logits = super()._begin(hidden, following, count)
        self._drafted, self._inputs = [], self._fed_back[:, :0]
        return logits

    def next_logits(self, tokens: mx.array) -> mx.array:
        number = len(self._drafted)
        self._drafted.append(tokens)
        if not self._later:
            return super().next_logits(tokens)
        if number >= len(self._outputs):
            layer = self._later[-1]
            layer._rows.advance(tokens, 1)
            head, self._fed_back = layer._step(tokens, self._fed_back)
            return layer._logits(head)
        # The layer also reads the positions that had to wait for these draft tokens.
        layer, tokens = self._later[number], mx.concatenate(self._drafted, axis=1)
        states = mx.concatenate([self._outputs[number], self._inputs], axis=1)
        layer._rows.advance(tokens, tokens.shape[1])
        head, self._inputs = layer._step(tokens, states)
        self._fed_back = self._inputs[:, -1:]
        return layer._logits(head[:, -1:])

    def _step(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        return self._network.step(tokens, states, self._entries)

    def rewind(self, lengths: tuple[int, ...]) -> None:
        for layer, processed in zip(self._later, self._processed, strict=True):
            layer.rewind(processed)
        super().rewind(lengths)

    def snapshot(self, sequence: int) -> Reusable:
        """See `RowsContext`. Only the first layer's positions are returned, and later layers begin
        without any. If a cache has a window, nothing is returned, because positions are missing."""
        return Reusable() if self._rows.windows else super().snapshot(sequence)

    def _state(self) -> list[list[mx.array]]:
        return super()._state() + [arrays for layer in self._later for arrays in layer._state()]
