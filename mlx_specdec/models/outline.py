"""Config-only models, which get random weights so that they can be timed. A kernel's time depends
on shapes and dtypes, and not on values, unless values are infinite or vanish."""

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..text.tokenizer import Kind
from .base import Base
from .number_format import NumberFormat, count, nbytes

BLOCK = 1 << 20
"""How many random numbers are drawn. Longer arrays repeat them, which is seven times as fast on a
CPU as drawing all."""


def fill(network: nn.Module, seed: int, shared: Mapping[str, mx.array]) -> None:
    """Set every matrix to random numbers of variance 1 / inputs, and compute all arrays. Vectors
    and matrices that are not quantized as "affine" stay as they are. Arrays whose names are in
    `shared` are taken from there."""
    quantized = {
        name: module
        for name, module in network.named_modules()
        if hasattr(module, "bits") and getattr(module, "mode", "affine") == "affine"
    }
    reach = math.sqrt(3)
    floats = mx.random.uniform(-reach, reach, (BLOCK,), key=mx.random.key(seed))
    words = mx.random.randint(-(2**31), 2**31 - 1, (BLOCK,), mx.int32, key=mx.random.key(seed))

    def draw(path: str, array: mx.array) -> mx.array:
        if path in shared:
            return shared[path]
        parent, _, name = path.rpartition(".")
        module = quantized.get(parent)
        if module is not None and name == "weight":
            return _repeat(words.view(mx.uint32), array, 1)
        if module is not None and name in ("scales", "biases"):
            # A uniform distribution over [-edge, edge] has the variance edge ** 2 / 3.
            edge = math.sqrt(3 / (module.scales.shape[-1] * module.group_size))
            value = 2 * edge / (2**module.bits - 1) if name == "scales" else -edge
            return mx.full(array.shape, value, dtype=array.dtype)
        if array.ndim < 2 or not mx.issubdtype(array.dtype, mx.floating):
            return array
        return _repeat(floats.astype(array.dtype), array, array.shape[-1] ** -0.5)

    network.update(tree_map_with_path(draw, network.parameters()))
    mx.eval(network.parameters())


def _repeat(block: mx.array, like: mx.array, gain: float) -> mx.array:
    flat = mx.tile(block, -(-like.size // block.size))[: like.size]
    return (flat * mx.array(gain, dtype=block.dtype)).reshape(like.shape)


class Outline(ABC):
    """A config-only model: its network has no weights until `model` is called.

    Attributes:
        dtype: The dtype of the weights in words, such as "4-bit, float32".
        network: The modules, whose arrays are not computed yet.
        expand: Whether loading this model would dequantize its weights if they are quantized.
        layers: The shapes and dtypes of each decoder layer; equal entries cost the same.
        layer_nbytes: The bytes of each decoder layer's weights.
    """

    kind: Kind
    dtype: str
    vocabulary: int

    def __init__(
        self, network: nn.Module, layers: Sequence[nn.Module], numbers: NumberFormat
    ) -> None:
        self.network = network
        self.nbytes = nbytes(network)
        self.expand = numbers.expands(count(network))
        self.layers: Sequence[Hashable] = [_signature(layer) for layer in layers]
        self.layer_nbytes: Sequence[int] = [nbytes(layer) for layer in layers]

    @property
    def token_nbytes(self) -> Sequence[int]:
        """Return the bytes of each table that has one row per token of the vocabulary."""
        tables: dict[str, int] = {}
        for name, array in self.weights().items():
            if array.shape[:1] == (self.vocabulary,):
                table = name.rpartition(".")[0]
                tables[table] = tables.get(table, 0) + array.nbytes
        return list(tables.values())

    @abstractmethod
    def cache_nbytes(self, prompt: int, generated: int) -> int:
        """Return the bytes of all caches after `prompt` prompt tokens and `generated` more."""

    def weights(self) -> Mapping[str, mx.array]:
        """Return all arrays by name. They have values only after `model` was called."""
        return dict(tree_flatten(self.network.parameters()))

    def model(self, seed: int = 0, shared: Mapping[str, mx.array] | None = None) -> Base:
        """Return the model with random weights. Call this only once. Arrays in `shared` are used as
        they are, so that two depths of one model share memory."""
        fill(self.network, seed, shared or {})
        return self._model()

    @abstractmethod
    def _model(self) -> Base:
        """Return the model that runs the network."""


def _signature(module: nn.Module) -> Hashable:
    return tuple(
        (name, array.shape, str(array.dtype)) for name, array in tree_flatten(module.parameters())
    )
