"""Layers that take fewer operations on MLX's CPU back end, since the host's time for
submitting operations decides small models' speed. Results are the same as MLX's, bit for bit.

MLX's rotary positions take 30 operations. Here all layers of a pass share the cosines and sines. A
matrix product of one sequence needs neither a transposed weight nor a flattened input."""

import os
import threading
from contextvars import ContextVar
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..errors import OptionError
from .number_format import on_cpu
from .patches import LIGHT_LAYERS

FEW_ROWS = 64
"""The most rows of a pass whose layers share cosines and sines. In longer passes the arithmetic
takes longer than submitting it."""
SUBMIT = "MLX_SPECDEC_SUBMIT_EVERY"
"""Environment variable for developers: on a GPU, `begin` submits after this many layers. Not yet
measured on Metal."""


_offsets: ContextVar[mx.array | None] = ContextVar("offsets", default=None)
"""The positions that `shared` marked last in a thread."""
_layers: ContextVar[int] = ContextVar("layers", default=0)
"""The number of layers that `begin` has counted in a thread, on a GPU."""


def shared(offsets: mx.array) -> mx.array:
    """Mark the positions of a pass, (batch,) int32, as constant, and return them. Their cosines and
    sines may then be reused."""
    _offsets.set(offsets)
    return offsets


class _Turns(threading.local):
    """The newest cosines and sines of rotary positions with the same settings, separately for each
    thread, because one thread cannot compute lazy arrays of another. Thread ids would be no keys
    for them: a new thread can get the id of a thread that has ended."""

    def __init__(self) -> None:
        self._computed: tuple[Any, dict[Any, tuple[mx.array, mx.array]]] = (None, {})

    def of(self, rope: nn.RoPE, heads: mx.array, offset: Any) -> tuple[mx.array, mx.array]:
        """Return the factors of heads, (batch, heads, rows, dims), and of heads with swapped
        halves. The sum of both products is the rotated heads."""
        at, factors = self._computed
        if at is not offset and not (type(at) is int and type(offset) is int and at == offset):
            self._computed = _, factors = offset, {}
        shape, dtype = heads.shape, heads.dtype
        if (shape, dtype) not in factors:
            one = (shape[0], 1, *shape[2:])
            if (one, dtype) not in factors:
                # MLX rotates the unit vector (1, 0) to (cosine, sine), whatever the settings are.
                half = mx.broadcast_to(mx.array([1, 0], dtype)[:, None], (2, shape[-1] // 2))
                unit = mx.broadcast_to(half.flatten(), one)
                cosines, sines = mx.split(nn.RoPE.__call__(rope, unit, offset), 2, axis=-1)
                straight = mx.concatenate([cosines, cosines], axis=-1)
                factors[one, dtype] = straight, mx.concatenate([-sines, sines], axis=-1)
            # Broadcast once here, or every product would add an operation that broadcasts.
            straight, crossed = factors[one, dtype]
            broadcast = mx.broadcast_to(straight, shape), mx.broadcast_to(crossed, shape)
            factors[shape, dtype] = broadcast
        return factors[shape, dtype]


class RoPE(nn.RoPE):
    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        fits = x.ndim == 4 and x.shape[-1] == self.dims and x.shape[-2] <= FEW_ROWS
        # Other arrays of offsets may change between two calls, as in mlx-lm's batches.
        if not fits or not (type(offset) is int or offset is _offsets.get()):
            return super().__call__(x, offset)
        straight, crossed = self.__dict__["_turns"].of(self, x, offset)
        first, second = mx.split(x, 2, axis=-1)
        return x * straight + mx.concatenate([second, first], axis=-1) * crossed


class Linear(nn.Linear):
    def __call__(self, x: mx.array) -> mx.array:
        weight, turned, batch_of_one = self.__dict__["_turned"]
        # Training replaces the weight in every step.
        if weight is not self["weight"]:
            return super().__call__(x)
        return x @ (batch_of_one if x.ndim == 3 and x.shape[0] == 1 else turned)


def lighten(network: nn.Module) -> None:
    """Replace the classes of a network's layers on a CPU. Names and parameters stay the same. Call
    this again after weights were replaced, whose views the layers keep. Raises OptionError for a
    wrong value of SUBMIT, so that no pass has to."""
    submit_every()
    if not on_cpu():
        return
    turns: dict[tuple[Any, ...], _Turns] = {}
    for module in network.modules():
        # Subclasses and quantized layers compute something else.
        if type(module) is nn.RoPE and not module.traditional:
            settings = module.dims, module.base, module.scale
            module.__dict__["_turns"] = turns.setdefault(settings, _Turns())
            LIGHT_LAYERS.apply(module, "__class__", RoPE)
        elif type(module) in (nn.Linear, Linear) and "bias" not in module:
            weight = module["weight"]
            module.__dict__["_turned"] = turned = weight, weight.T, weight.T[None]
            mx.eval(turned)  # other threads cannot compute this thread's lazy views
            LIGHT_LAYERS.apply(module, "__class__", Linear)


@cache
def submit_every() -> int:
    """Return the number of layers in SUBMIT, or 0 if it is not set. Raises OptionError if it is no
    positive number."""
    value = os.environ.get(SUBMIT, "")
    if not value:
        return 0
    if not (value.isdecimal() and int(value) >= 1):
        raise OptionError(
            f"{SUBMIT} must be a whole number of layers, 1 or more, not {value!r}: change it or "
            "unset it"
        )
    return int(value)


def begin(states: mx.array) -> mx.array:
    """Submit a layer's result to the device while the host builds the next layers, and return it.

    On a CPU every layer is submitted: a plain decoding step of a small model then takes 0.78 of the
    time, and a step of four sequences 0.88. On a GPU every n-th layer is submitted if SUBMIT is n,
    and no layer otherwise."""
    if on_cpu():
        mx.async_eval(states)
    elif every := submit_every():
        _layers.set(_layers.get() + 1)
        if _layers.get() % every == 0:
            mx.async_eval(states)
    return states
