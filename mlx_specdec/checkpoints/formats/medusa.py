"""A directory of Medusa heads, in either layout that text-generation-inference reads:
`{head}.{layer}.linear.weight` and `.bias`, and perhaps `{head}.{layers}.weight`, an output layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ...errors import CheckpointError
from ..disk import read_json
from ..files import whole_number
from ..tensors import Reader, check_weights
from .safetensors import SafetensorsFile
from .torch import TorchFile

SAFETENSORS = "medusa_lm_head.safetensors"
TORCH = "medusa_lm_head.pt"
COUNT, LAYERS, BASE = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
MOST = 64


@dataclass(frozen=True)
class MedusaFiles:
    """Heads in a file. base: name of the base model. width, vocabulary: of the base, None where
    nothing says it. own_output: whether every head has an output layer."""

    file: Path
    base: str
    count: int
    layers: int
    width: int
    vocabulary: int | None
    own_output: bool
    tensors: Mapping[str, mx.array]


def is_medusa(directory: Path) -> bool:
    """Return whether this directory holds heads and not a whole model."""
    file = directory / "config.json"
    return file.is_file() and COUNT in read_json(file)


def file_of(directory: Path) -> Path:
    """The file of heads. Raises CheckpointError where there is none."""
    for name in (SAFETENSORS, TORCH):
        if (directory / name).is_file():
            return directory / name
    raise CheckpointError(f"{directory} has neither {SAFETENSORS} nor {TORCH}: download it again")


def names(head: int, layers: int, *, own_output: bool) -> list[str]:
    """The tensors of one head, in order."""
    parts = [f"{head}.{n}.linear.{part}" for n in range(layers) for part in ("weight", "bias")]
    return [*parts, f"{head}.{layers}.weight"] if own_output else parts


def read(directory: Path) -> MedusaFiles:
    """The heads of a directory, every tensor checked. Raises CheckpointError."""
    config_file = directory / "config.json"
    config = read_json(config_file)
    base = config.get(BASE)
    if not isinstance(base, str) or not base.strip():
        raise CheckpointError(f"{config_file} has no {BASE}: add the name of the heads' base model")
    count = whole_number(config, COUNT, most=MOST)
    layers = whole_number(config, LAYERS, 1, MOST)
    file = file_of(directory)
    opened: Reader = SafetensorsFile(file) if file.name == SAFETENSORS else TorchFile(file)
    shapes = {name: info.shape for name, info in opened.infos.items()}
    width, vocabulary = _length(shapes, "0.0.linear.weight"), _length(shapes, f"0.{layers}.weight")
    own_output = vocabulary is not None
    expected: dict[str, tuple[int, ...]] = {}
    for head in range(count):
        for name in names(head, layers, own_output=own_output):
            rows = width if ".linear." in name else vocabulary
            expected[name] = (width or 0,) if name.endswith("bias") else (rows or 0, width or 0)
    try:
        check_weights(expected, shapes)
    except CheckpointError as problem:
        raise CheckpointError(f"{file}: {problem}") from None
    if vocabulary is None and type(config.get("vocab_size")) is int:
        vocabulary = config["vocab_size"]
    tensors = {name: opened.rows(name, 0, info.extent) for name, info in opened.infos.items()}
    return MedusaFiles(file, base, count, layers, width or 0, vocabulary, own_output, tensors)


def _length(shapes: Mapping[str, tuple[int, ...]], name: str) -> int | None:
    """Rows of a tensor, 0 where it has none; None where it is not there."""
    return next(iter(shapes[name]), 0) if name in shapes else None
