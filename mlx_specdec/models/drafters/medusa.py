"""Medusa heads: their files and their computation. A head has residual layers on the base model's
last hidden state, and then an output layer, either its own or the base model's. Source: Cai et al.,
arXiv 2401.10774, section 2.1.1. Both layouts that text-generation-inference reads are supported.
Tensors are named `{head}.{layer}.linear.weight` and `.bias`; `{head}.{layers}.weight` is the output
layer of a head that has one."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from ...checkpoints import shards
from ...checkpoints.disk import read_json
from ...checkpoints.files import whole_number
from ...checkpoints.formats.safetensors import SafetensorsFile
from ...checkpoints.formats.torch import TorchFile
from ...checkpoints.tensors import TensorReader, check_weights
from ...errors import CheckpointError
from ..base import Base
from ..number_format import nbytes
from .files import check_sizes

HEADS_KEY, LAYERS_KEY, BASE_KEY = "medusa_num_heads", "medusa_num_layers", "base_model_name_or_path"
MOST_HEADS = 64
"""Maximum number of heads, and of residual layers per head, that a config.json may state."""


@dataclass(frozen=True)
class MedusaFiles:
    """Medusa heads in a file.

    Attributes:
        base: Name of the base model.
        width: Width of the base model's hidden states.
        vocabulary: Size of the base model's vocabulary; None if the files do not say it.
        parts: See `MedusaHeads`.
    """

    file: Path
    base: str
    width: int
    vocabulary: int | None
    parts: Sequence[Any]


def is_medusa(directory: Path) -> bool:
    """Return whether a directory holds Medusa heads, and not a whole model."""
    file = directory / "config.json"
    return file.is_file() and HEADS_KEY in read_json(file)


def file_of(directory: Path) -> Path:
    """Return the file of the heads' tensors. Raises CheckpointError if there is none."""
    candidates = shards.HEADS, shards.TORCH_HEADS
    if found := [name for name in candidates if (directory / name).is_file()]:
        return directory / found[0]
    raise CheckpointError(f"{directory} has neither {' nor '.join(candidates)}: download it again")


def read(directory: Path) -> MedusaFiles:
    """Read the heads of a directory and check every tensor's shape. Raises CheckpointError."""
    config_file = directory / "config.json"
    config = read_json(config_file)
    base = config.get(BASE_KEY)
    if not isinstance(base, str) or not base.strip():
        raise CheckpointError(
            f"{config_file} has no {BASE_KEY}: add the name of the heads' base model"
        )
    count = whole_number(config, HEADS_KEY, most=MOST_HEADS)
    layers = whole_number(config, LAYERS_KEY, 1, MOST_HEADS)
    file = file_of(directory)
    opened: TensorReader = SafetensorsFile(file) if file.name == shards.HEADS else TorchFile(file)
    shapes = {name: info.shape for name, info in opened.infos.items()}
    width = next(iter(shapes.get("0.0.linear.weight", ())), 0)
    vocabulary = next(iter(shapes.get(f"0.{layers}.weight", ())), None)
    parts: dict[str, tuple[int, ...]] = {}
    for layer in range(layers):
        parts |= {f"{layer}.linear.weight": (width, width), f"{layer}.linear.bias": (width,)}
    if vocabulary is not None:
        parts[f"{layers}.weight"] = vocabulary, width
    heads = range(count)
    expected = {f"{head}.{name}": shape for head in heads for name, shape in parts.items()}
    check_weights(expected, shapes, f"{file}: ")
    if vocabulary is None and type(config.get("vocab_size")) is int:
        vocabulary = config["vocab_size"]
    stacked = [
        (name, mx.stack([opened.read(f"{head}.{name}") for head in heads])) for name in parts
    ]
    return MedusaFiles(file, base, width, vocabulary, tree_unflatten(stacked))


class MedusaHeads(nn.Module):
    """All heads of one base model. They read the hidden state "final", the inputs of the base
    model's output layer, including the factor by which a T5 scales these.

    Attributes:
        parts: The weights of all heads in a tree with the names of one head's tensors. For each
            residual layer, it has matrices, (heads, width, width), and biases, (heads, width). At
            the end it may have output layers, (heads, vocabulary, width).
    """

    def __init__(self, base: Base, parts: Sequence[Any]) -> None:
        super().__init__()
        self._base, self.vocabulary = base, base.vocabulary
        self.parts = list(parts)
        self.own_output = "weight" in parts[-1]
        self.layers = len(parts) - self.own_output
        self.count: int = parts[0]["linear"]["weight"].shape[0]

    @property
    def nbytes(self) -> int:
        return nbytes(self)

    def logits(self, state: mx.array, count: int) -> mx.array:
        """Return the logits of the first `count` heads, (batch, count, vocabulary), from the hidden
        state "final", (batch, 1, width)."""
        return self.project(self.refine(state[:, 0], count)).swapaxes(0, 1)

    def refine(self, states: mx.array, count: int) -> mx.array:
        """Run the residual layers of the first `count` heads: (n, width) -> (count, n, width)."""
        refined = mx.broadcast_to(states[None], (count, *states.shape))
        for part in self.parts[: self.layers]:
            weight, bias = part["linear"]["weight"], part["linear"]["bias"]
            inner = refined @ weight[:count].swapaxes(1, 2) + bias[:count, None]
            refined = refined + inner * mx.sigmoid(inner)
        return refined

    def project(self, refined: mx.array) -> mx.array:
        """Run the output layers on the result of `refine`: (count, n, width) -> (count, n,
        vocabulary)."""
        count, rows, width = refined.shape
        if self.own_output:
            return refined @ self.parts[-1]["weight"][:count].swapaxes(1, 2)
        # One pass over all rows reads the weights of the base model's output layer only once.
        states = refined.astype(self._base.state_dtype).reshape(1, count * rows, width)
        return self._base.head(states).reshape(count, rows, -1)

    def tensors(self) -> dict[str, mx.array]:
        """Return every tensor by its name in the files of heads."""
        stacks = tree_flatten(self.parts)
        return {
            f"{head}.{name}": stack[head] for head in range(self.count) for name, stack in stacks
        }


def attach(files: MedusaFiles, base: Base) -> MedusaHeads:
    """Return the heads of a directory for a loaded base model. They compute in the dtype of its
    hidden states. Raises CheckpointError if the heads were made for another base model."""
    check_sizes(files.file, (files.width, base.width), (files.vocabulary, base.vocabulary))
    heads = MedusaHeads(base, files.parts)
    heads.set_dtype(base.state_dtype)
    mx.eval(heads.parameters())
    return heads
