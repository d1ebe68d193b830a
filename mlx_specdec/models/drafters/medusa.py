"""Medusa heads: their files and their computation. A head has residual layers on the base model's
last hidden state, and then an output layer, either its own or the base model's. Source: Cai et al.,
arXiv 2401.10774, section 2.1.1. Both layouts that text-generation-inference reads are supported.
Tensors are named `{head}.{layer}.linear.weight` and `.bias`; `{head}.{layers}.weight` is the output
layer of a head that has one."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

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
        count: Number of heads.
        layers: Number of residual layers per head.
        width: Width of the base model's hidden states.
        vocabulary: Size of the base model's vocabulary; None if the files do not say it.
        own_output: Whether every head has an output layer of its own.
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
    """Return whether a directory holds Medusa heads, and not a whole model."""
    file = directory / "config.json"
    return file.is_file() and HEADS_KEY in read_json(file)


def file_of(directory: Path) -> Path:
    """Return the file of the heads' tensors. Raises CheckpointError if there is none."""
    candidates = shards.HEADS, shards.TORCH_HEADS
    if found := [name for name in candidates if (directory / name).is_file()]:
        return directory / found[0]
    raise CheckpointError(f"{directory} has neither {' nor '.join(candidates)}: download it again")


def names(head: int, layers: int, *, own_output: bool) -> list[str]:
    """Return the names of one head's tensors, in order."""
    parts = [f"{head}.{n}.linear.{part}" for n in range(layers) for part in ("weight", "bias")]
    return [*parts, f"{head}.{layers}.weight"] if own_output else parts


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
    lengths = {name: next(iter(shape), 0) for name, shape in shapes.items()}  # of first axes
    width, vocabulary = lengths.get("0.0.linear.weight"), lengths.get(f"0.{layers}.weight")
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
    tensors = {name: opened.read(name) for name in opened.infos}
    return MedusaFiles(file, base, count, layers, width or 0, vocabulary, own_output, tensors)


class MedusaHeads(nn.Module):
    """All heads of one base model. They read the hidden state "final", the inputs of the base
    model's output layer, including the factor by which a T5 scales these.

    Attributes:
        weights: For each residual layer, the weights of all heads, (heads, width, width).
        biases: For each residual layer, the biases of all heads, (heads, width).
        output: Output layers, (heads, vocabulary, width); absent if the heads use the base model's.
    """

    def __init__(self, base: Base, layers: list[tuple[mx.array, mx.array]]) -> None:
        super().__init__()
        self._base, self.vocabulary = base, base.vocabulary
        self.weights = [weight for weight, _ in layers]
        self.biases = [bias for _, bias in layers]

    @property
    def count(self) -> int:
        return int(self.weights[0].shape[0])

    @property
    def own_output(self) -> bool:
        return "output" in self

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
        for weight, bias in zip(self.weights, self.biases, strict=True):
            inner = refined @ weight[:count].swapaxes(1, 2) + bias[:count, None]
            refined = refined + inner * mx.sigmoid(inner)
        return refined

    def project(self, refined: mx.array) -> mx.array:
        """Run the output layers on the result of `refine`: (count, n, width) -> (count, n,
        vocabulary)."""
        count, rows, width = refined.shape
        if self.own_output:
            return refined @ self.output[:count].swapaxes(1, 2)
        # One pass over all rows reads the weights of the base model's output layer only once.
        states = refined.astype(self._base.state_dtype).reshape(1, count * rows, width)
        return self._base.head(states).reshape(count, rows, -1)

    def tensors(self) -> dict[str, mx.array]:
        """Return every tensor by its name in the files of heads."""
        stacks = [part for pair in zip(self.weights, self.biases, strict=True) for part in pair]
        if self.own_output:
            stacks.append(self.output)
        named = [
            names(head, len(self.weights), own_output=self.own_output) for head in range(self.count)
        ]
        return {
            name: stack[head]
            for head, row in enumerate(named)
            for name, stack in zip(row, stacks, strict=True)
        }


def attach(files: MedusaFiles, base: Base) -> MedusaHeads:
    """Return the heads of a directory for a loaded base model. They compute in the dtype of its
    hidden states. Raises CheckpointError if the heads were made for another base model."""
    check_sizes(files.file, (files.width, base.width), (files.vocabulary, base.vocabulary))

    def stack(name: str) -> mx.array:
        arrays = [files.tensors[f"{head}.{name}"] for head in range(files.count)]
        return mx.stack(arrays).astype(base.state_dtype)

    paths = [f"{layer}.linear" for layer in range(files.layers)]
    heads = MedusaHeads(base, [(stack(f"{p}.weight"), stack(f"{p}.bias")) for p in paths])
    if files.own_output:
        heads.output = stack(f"{files.layers}.weight")
    mx.eval(heads.parameters())
    return heads
