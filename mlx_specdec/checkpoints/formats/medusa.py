"""A directory of Medusa heads -> what they are, the name of their base model, and their tensors.

The two layouts of medusa_lm_head files are as text-generation-inference reads them:
`{head}.{layer}.linear.weight` and `.bias`, and `{head}.{layers}.weight` where a head has an output
layer of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ..disk.reading import read_json
from .reader import DTYPES, Reader
from .safetensors import SafetensorsFile
from .torch.file import TorchFile

SAFETENSORS = "medusa_lm_head.safetensors"
TORCH = "medusa_lm_head.pt"
COUNT, LAYERS, BASE = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
MOST = 64
_NAME = re.compile(r"(\d{1,4})\.(\d{1,4})\.(linear\.weight|linear\.bias|weight)", re.ASCII)


@dataclass(frozen=True)
class MedusaFiles:
    """Heads as they lie in a file.

    base: name of the base model as config.json has it. width, vocabulary: of the base, as the
    tensors or config.json say; None where neither does. tensors: by name, complete, each of the
    shape that the layout asks for. own_output: whether every head has an output layer of its own.
    """

    file: Path
    base: str
    count: int
    layers: int
    width: int
    vocabulary: int | None
    own_output: bool
    tensors: Mapping[str, mx.array]


def is_medusa(directory: Path) -> bool:
    """Whether this directory holds heads and not a whole model."""
    file = directory / "config.json"
    return file.is_file() and COUNT in read_json(file)


def names(head: int, layers: int, *, own_output: bool) -> list[str]:
    """The tensors of one head, in order."""
    parts = [f"{head}.{n}.linear.{part}" for n in range(layers) for part in ("weight", "bias")]
    return [*parts, f"{head}.{layers}.weight"] if own_output else parts


def read(directory: Path) -> MedusaFiles:
    """The heads of a directory, every tensor checked.

    Raises CheckpointError where config.json or the file of heads is missing, damaged, or
    contradicts the other, and for a layout that is not one of the two.
    """
    config_file = directory / "config.json"
    config = read_json(config_file)
    base = config.get(BASE)
    if not isinstance(base, str) or not base.strip():
        raise CheckpointError(f"{config_file} has no {BASE}: add the name of the heads' base model")
    count = _whole(config_file, config, COUNT, None)
    layers = _whole(config_file, config, LAYERS, 1)
    file, tensors = _tensors(directory)
    own_output = _check_names(file, tensors, count, layers)
    width, vocabulary = _check_shapes(file, tensors, count, layers, own_output)
    for key, held in (("hidden_size", width), ("vocab_size", vocabulary)):
        said = config.get(key)
        if type(said) is int and held is not None and said != held:
            raise CheckpointError(f"{config_file} has {key} {said}, and {file.name} has {held}")
    said = config.get("vocab_size")
    if vocabulary is None and type(said) is int:
        vocabulary = said
    return MedusaFiles(file, base, count, layers, width, vocabulary, own_output, tensors)


def _tensors(directory: Path) -> tuple[Path, dict[str, mx.array]]:
    for name, kind in ((SAFETENSORS, SafetensorsFile), (TORCH, TorchFile)):
        file = directory / name
        if file.is_file():
            opened: Reader = kind(file)
            for name, info in opened.infos.items():
                if not mx.issubdtype(DTYPES[info.dtype], mx.floating):
                    raise CheckpointError(f"{file} stores {name} as {info.dtype}: heads are floats")
            return file, {n: opened.rows(n, 0, i.extent) for n, i in opened.infos.items()}
    raise CheckpointError(
        f"{directory} has neither {SAFETENSORS} nor {TORCH}: the heads that config.json names are "
        "missing"
    )


def _whole(file: Path, config: Mapping[str, Any], name: str, default: int | None) -> int:
    value = config.get(name, default)
    if type(value) is not int or not 1 <= value <= MOST:
        raise CheckpointError(f"{file} has {name} {value!r}: need a number from 1 to {MOST}")
    return value


def _check_names(file: Path, tensors: Mapping[str, mx.array], count: int, layers: int) -> bool:
    """Whether heads have output layers of their own."""
    strange = next((name for name in sorted(tensors) if not _NAME.fullmatch(name)), None)
    if strange is not None:
        raise CheckpointError(
            f"{file} has the tensor {ascii(strange)[1:-1]:.100}, which is part of no known layout "
            "of Medusa heads"
        )
    own_output = f"0.{layers}.weight" in tensors
    expected = {
        name for head in range(count) for name in names(head, layers, own_output=own_output)
    }
    for problem, others in (
        ("lacks", sorted(expected - tensors.keys())),
        ("has also", sorted(tensors.keys() - expected)),
    ):
        if others:
            raise CheckpointError(
                f"{file} {problem} {others[0]}, where config.json has {COUNT} {count} and {LAYERS} "
                f"{layers}: download both again"
            )
    return own_output


def _check_shapes(
    file: Path, tensors: Mapping[str, mx.array], count: int, layers: int, own_output: bool
) -> tuple[int, int | None]:
    """The base's width, and its vocabulary where an output layer tells it."""
    width = tensors["0.0.linear.weight"].shape[-1] if tensors["0.0.linear.weight"].ndim else 0
    output = tensors[f"0.{layers}.weight"].shape if own_output else ()
    for head in range(count):
        for name in names(head, layers, own_output=own_output):
            asked = (width,) if name.endswith("bias") else (width, width)
            if own_output and name == f"{head}.{layers}.weight":
                asked = (output[0] if output else 0, width)
            if tensors[name].shape != asked or not width:
                raise CheckpointError(
                    f"{file} is damaged: {name} has shape {tensors[name].shape} where {asked} "
                    "belongs"
                )
    return width, output[0] if own_output else None
