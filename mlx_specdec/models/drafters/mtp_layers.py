"""Layers for multi-token prediction in a model's checkpoint, which mlx-lm drops. A conversion
copies them unchanged into a file that mlx-lm does not read."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import filterfalse
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...checkpoints import shards
from ...checkpoints.files import Weights, text_config
from ...checkpoints.formats import safetensors
from ...checkpoints.formats.safetensors import SafetensorsFile
from ...checkpoints.shards import MTP_LAYERS
from ...checkpoints.tensors import Tensor, TensorReader

QWEN = frozenset(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"))
"""Types of models with Qwen's layers."""
NUMBERED = frozenset(
    ("deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "step3p5")
)
"""Types of models whose layers are numbered after the layers of the model."""
CENTERED = QWEN | {"step3p5"}
"""Types of models whose authors store norms as the difference from 1."""
SPLIT = frozenset(("qwen3_5_mtp", "glm4_moe_lite_mtp", "glm_moe_dsa_mtp"))
"""Types of the directories that mlx-vlm's `split_mtp` writes. They hold only such layers, in MLX's
layout, and have the type of the target in `text_config`."""
CONVOLUTION = "conv1d.weight"
_MTP = re.compile(r"(?:(?:language_)?model\.)*mtp\.")
_ERNIE = re.compile(r"model\.mtp_(?:block|emb_norm|hidden_norm|linear_proj)\.\d+\.")
_NAMED = {
    **dict.fromkeys((*QWEN, "nemotron_h"), _MTP),
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe"), _ERNIE),
    "mimo": re.compile(r"model\.mtp_layers\.\d+\."),
}
"""Type of a model -> how the names of the layers' tensors begin."""
MTP_TYPES = NUMBERED | _NAMED.keys()
MTP_FAMILIES = MTP_TYPES - {"qwen3_5_text", "qwen3_5_moe_text"}
"""Types of models whose layers are supported, and the same as users read them."""
_NUMBERED = re.compile(r"model\.layers\.(\d+)\.")
_ANY = re.compile(r"(?:.*\.)?(?:mtp\w*|eh_proj)\..*")
_COPY = re.compile(r"(?:.*\.)?(?:embed_tokens|shared_head\.head|lm_head)\.\w+")
_ENCODING, _DELTA = "mtplx_mtp_norm_encoding", ("delta", "delta_plus_one", "mlx_delta")
"""Entry with which a pack of MTPLX says how norms are stored, and its values for the difference
from 1."""
_MENTIONS = re.compile(r".*(?:mtp|nextn).*")


def is_split(config: Mapping[str, Any]) -> bool:
    """Return whether config.json has a type in SPLIT."""
    return config.get("model_type") in SPLIT


def family(config: Mapping[str, Any]) -> str:
    """Return the type of the model to which the layers belong."""
    return str(text_config(config).get("model_type") or config.get("model_type"))


def known(config: Mapping[str, Any]) -> Callable[[str], bool]:
    """Return a function that tests by a tensor's name whether it belongs to such layers. The
    function is always false for an unknown family."""
    if is_split(config):
        return lambda name: True
    if (named := _NAMED.get(family(config))) is not None:
        return lambda name: named.match(name) is not None
    layers = text_config(config).get("num_hidden_layers")
    if family(config) in NUMBERED and type(layers) is int:
        # The layers of the model itself have smaller numbers.
        return lambda name: (layer := _NUMBERED.match(name)) is not None and int(layer[1]) >= layers
    return lambda name: False


def carried(directory: Path, config: Mapping[str, Any]) -> tuple[dict[str, mx.array], bool] | None:
    """Return the lazy tensors of the layers in a directory, and whether they have the layout of the
    model's authors; None without any. Raises CheckpointError."""
    if family(config) not in MTP_TYPES:
        return None
    if (file := directory / MTP_LAYERS).is_file():
        original, arrays = is_original(SafetensorsFile(file), config), safetensors.load(file)
        return _without_copies(arrays, arrays.__getitem__), original
    if shards.format_of(directory) not in ("safetensors", "torch"):
        return None
    weights = Weights(directory)
    names = [*filter(known(config), weights.infos)]
    return (_without_copies(names, weights.read), is_original(weights, config)) if names else None


def all_of(weights: Weights) -> dict[str, mx.array]:
    """Return the lazy tensors of weights that hold only such layers."""
    return _without_copies(weights.infos, weights.read)


def _without_copies(names: Iterable[str], read: Callable[[str], mx.array]) -> dict[str, mx.array]:
    return {name: read(name) for name in filterfalse(is_copy, names)}


def tensors(directory: Path, config: Mapping[str, Any], weights: Weights) -> dict[str, Tensor]:
    """Return the tensors that a conversion copies. weights: The weights in `directory`."""
    if (file := directory / MTP_LAYERS).is_file():
        reader: TensorReader = SafetensorsFile(file)
        return {name: reader.tensor(name) for name in reader.infos}
    names = [*filter(known(config), weights.infos)]
    return {name: weights.tensor(name) for name in names} if is_original(weights, config) else {}


def is_original(reader: TensorReader, config: Mapping[str, Any]) -> bool:
    """Return whether weights have the layout of the model's authors. mlx-lm transposes convolutions
    and adds 1 to norms. MTPLX quantizes the layers, and may store norms as the authors do. Raises
    CheckpointError."""
    if any(part.get(_ENCODING) in _DELTA for part in (config, text_config(config))):
        return True
    shapes = [info.shape for name, info in reader.infos.items() if name.endswith(CONVOLUTION)]
    if shapes:
        return any(shape[-1:] != (1,) for shape in shapes)
    quantized = any(name.endswith(".scales") for name in filter(looks_so, reader.infos))
    files = [path for path in reader.paths if path.suffix == ".safetensors"]
    return not quantized and not any(safetensors.metadata(f).get("format") == "mlx" for f in files)


def foreign(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return whether a directory has such layers of an unknown family. Raises CheckpointError."""
    mentioned = any(_MENTIONS.fullmatch(key) for key in (*config, *text_config(config)))
    if not mentioned or family(config) in MTP_TYPES or not shards.format_of(directory):
        return False
    return any(map(looks_so, Weights(directory).infos))


def is_copy(name: str) -> bool:
    """Return whether a tensor of such a layer is a copy of the target's embedding or head."""
    return _COPY.fullmatch(name) is not None


def looks_so(name: str) -> bool:
    """Return whether a tensor with this name may belong to layers for multi-token prediction,
    whatever the family of the model."""
    return _ANY.fullmatch(name) is not None
