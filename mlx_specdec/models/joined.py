"""Layers that read the same states, as one product: their matrices lie below one another.

The layers keep their names, which are those of checkpoints; their arrays become views of the joined
ones and take no memory of their own.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

ARRAYS = ("weight", "scales", "biases")
"""Of a linear layer, quantized or not: a row of each belongs to one output."""


@dataclass(frozen=True)
class _Whole:
    """layer: all of them in one. parts: their arrays when it was made. It is no nn.Module, so that
    no tree of modules and parameters has both."""

    layer: nn.Module
    parts: Sequence[mx.array]


class Joined(nn.Module):
    """A module with such layers. names: of these, as wide as one another and without bias."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._names = tuple(names)
        self._whole: _Whole | None = None

    def join(self) -> None:
        """Make one layer of them, at once; different formats of their numbers keep them apart."""
        layers = [self[name] for name in self._names]
        alike = len({_format(layer) for layer in layers}) == 1
        if len(layers) == 1 or not alike or self._joined(layers) is not None:
            return
        whole = copy.copy(layers[0])
        names = [name for name in ARRAYS if whole.get(name) is not None]
        for name in names:
            whole[name] = mx.concatenate([layer[name] for layer in layers])
        mx.eval(whole.parameters())
        for name in names:
            for layer, part in zip(layers, mx.split(whole[name], len(layers)), strict=True):
                layer[name] = part
        parts = _arrays(layers)
        mx.eval(parts)
        self._whole = _Whole(whole, parts)

    def together(self, states: mx.array) -> list[mx.array]:
        """What each of the layers makes of (batch, n, width)."""
        layers = [self[name] for name in self._names]
        whole = self._joined(layers)
        if whole is None:
            return [layer(states) for layer in layers]
        return list(mx.split(whole(states), len(layers), axis=-1))

    def _joined(self, layers: Sequence[nn.Module]) -> nn.Module | None:
        """None where a layer has other weights by now: it was trained, or quantized."""
        if self._whole is None:
            return None
        now, then = _arrays(layers), self._whole.parts
        if len(now) != len(then) or not all(map(operator.is_, now, then)):
            self._whole = None
            return None
        return self._whole.layer


def _arrays(layers: Sequence[nn.Module]) -> list[mx.array]:
    return [layer[name] for layer in layers for name in ARRAYS if name in layer]


def _format(layer: nn.Module) -> Hashable:
    """Equal for layers whose arrays may lie below one another."""
    numbers = tuple(getattr(layer, name, None) for name in ("bits", "group_size", "mode"))
    shapes = tuple((layer[name].shape, layer[name].dtype) for name in ARRAYS if name in layer)
    return type(layer), numbers, shapes
