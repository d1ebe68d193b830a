"""The layers of one pass in fewer operations, for MLX's CPU back end, where small models spend the
host's time on submitting operations. The arithmetic is MLX's own, bit for bit: rotary positions,
30 operations there, take their cosines and sines from one call for all layers of a pass, and a
product of one sequence needs neither a transposed weight nor a flat input."""

import os
import threading
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import OptionError
from .number_format import on_cpu, twin_of
from .patches import LIGHT_LAYERS

FEW_ROWS = 64
"""Of a pass whose positions are shared; in longer ones the arithmetic decides."""
SUBMIT = "MLX_SPECDEC_SUBMIT_EVERY"
"""An environment variable for developers: the number of layers after which `begin` submits off the
CPU. It is not known yet whether that pays on Metal."""


class _Newest(threading.local):
    offsets: mx.array | None = None
    layers = 0


_newest = _Newest()


def shared(offsets: mx.array) -> mx.array:
    """Return the positions of a pass, (batch,) int32, after noting that nobody writes to them."""
    _newest.offsets = offsets
    return offsets


class _Turns(threading.local):
    """The newest cosines and sines of rotary positions with the same settings, of each thread. One
    thread cannot compute the lazy arrays of another. A thread's id is no key for them: a new thread
    can get the id of a thread that has ended."""

    def __init__(self) -> None:
        self._made: tuple[Any, dict[Any, tuple[mx.array, mx.array]]] = (None, {})

    def of(self, rope: nn.RoPE, heads: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """Return what heads, (batch, heads, rows, dims), and their swapped halves are times."""
        at, made = self._made
        if at is not offset and not (type(at) is int and type(offset) is int and at == offset):
            self._made = _, made = offset, {}
        shape, dtype = heads.shape, heads.dtype
        if (shape, dtype) not in made:
            one = (shape[0], 1, *shape[2:])
            if (one, dtype) not in made:
                # Rotating (1, 0) shows both, whatever the settings are.
                half = mx.broadcast_to(mx.array([1, 0], dtype)[:, None], (2, shape[-1] // 2))
                unit = mx.broadcast_to(half.flatten(), one)
                cosines, sines = mx.split(nn.RoPE.__call__(rope, unit, offset), 2, axis=-1)
                straight = mx.concatenate([cosines, cosines], axis=-1)
                made[one, dtype] = straight, mx.concatenate([-sines, sines], axis=-1)
            # An operation that finds equal shapes adds none that stretches one of them.
            straight, crossed = made[one, dtype]
            made[shape, dtype] = mx.broadcast_to(straight, shape), mx.broadcast_to(crossed, shape)
        return made[shape, dtype]


class RoPE(nn.RoPE):
    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        whole = x.ndim == 4 and x.shape[-1] == self.dims and x.shape[-2] <= FEW_ROWS
        # Other arrays may be written to between two calls, as those of mlx-lm's batches are.
        if not whole or not (type(offset) is int or offset is _newest.offsets):
            return super().__call__(x, offset)
        straight, crossed = self.__dict__["_turns"].of(self, x, offset)
        first, second = mx.split(x, 2, axis=-1)
        return x * straight + mx.concatenate([second, first], axis=-1) * crossed


class Linear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        weight, turned, batch_of_one = self.__dict__["_turned"]
        # While it is trained it has other weights in every step.
        if weight is not self["weight"]:
            return super().__call__(x)
        return x @ (batch_of_one if x.ndim == 3 and x.shape[0] == 1 else turned)


def lighten(network: nn.Module) -> None:
    """Change the layers of a network in place, on a CPU; their names and parameters stay. Raises
    OptionError as `submit_every` does, before any pass."""
    submit_every()
    if not on_cpu():
        return
    turns: dict[tuple[Any, ...], _Turns] = {}
    for module in network.modules():
        # Subclasses and quantized layers have arithmetic of their own.
        if type(module) is nn.RoPE and not module.traditional:
            settings = module.dims, module.base, module.scale
            module.__dict__["_turns"] = turns.setdefault(settings, _Turns())
            LIGHT_LAYERS.apply(module, "__class__", RoPE)
        elif type(module) is nn.Linear and "bias" not in module:
            weight = module["weight"]
            module.__dict__["_turned"] = turned = weight, weight.T, weight.T[None]
            mx.eval(turned)  # views, without which other threads than this one could not compute
            LIGHT_LAYERS.apply(module, "__class__", Linear)


@cache
def submit_every() -> int:
    """Return the number of layers that SUBMIT names, or 0 if it is not set. Raises OptionError."""
    said = os.environ.get(SUBMIT, "")
    if not said:
        return 0
    if not (said.isdecimal() and int(said) >= 1):
        raise OptionError(
            f"{SUBMIT} must be a whole number of layers, 1 or more, not {said!r}: change it or "
            "unset it"
        )
    return int(said)


def begin(states: mx.array) -> mx.array:
    """Let the device begin with what a layer returns while the host builds the layers after it.

    A CPU begins with every layer: a step of a small model takes 0.78 of the time, four sequences at
    once 0.88. A GPU begins with every n-th layer of a thread's passes if SUBMIT is n, and otherwise
    with none."""
    if on_cpu():
        mx.async_eval(states)
    elif every := submit_every():
        _newest.layers += 1
        if _newest.layers % every == 0:
            mx.async_eval(states)
    return states


def as_mlx_has_it(network: nn.Module) -> nn.Module:
    """Return a copy of a network with MLX's own layers, whose parameters are the same arrays."""
    copied = twin_of(network)
    for module in copied.modules():
        LIGHT_LAYERS.undo(module)
    return copied
