"""Hidden states of a model that was written without showing them.

A tapped module gets a subclass of its own class, so its parameters, its name in the model and
whatever else is said about it stay as they are.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ...errors import OptionError
from ...interfaces import after

LENT = {"keys": "k_norm", "values": "v_norm"}
"""What a layer's attention calls the modules that keys and values come out of, head by head."""


def layer_of(name: str, layers: int) -> int:
    """The layer whose output is called `name`. Raises OptionError where there is none."""
    number = name.removeprefix("after.")
    if name.startswith("after.") and number.isdecimal() and int(number) < layers:
        return int(number)
    raise OptionError(
        f"the model has no hidden state {name!r}: it has 'final' and "
        f"{after(0)!r} to {after(layers - 1)!r}"
    )


def lent_of(name: str, layers: Sequence[Any]) -> nn.Module | None:
    """The module that puts out what is called `name` where that is a layer's keys or values; None
    where it is not, or where the layer does not show them."""
    part, _, number = name.partition(".")
    if part not in LENT or not number.isdecimal() or int(number) >= len(layers):
        return None
    return getattr(getattr(layers[int(number)], "self_attn", None), LENT[part], None)


class Shown(Exception):
    """Ends a call of a model as soon as the input of a module is known."""

    def __init__(self, state: Any) -> None:
        self.state = state


class Tap(threading.local):
    """Keeps what a module returns for one call after `arm`, or answers in its place.

    Every thread has its own; the module stays tapped.
    """

    _armed = False
    _stops = False
    _kept: Any = None
    _given: mx.array | None = None

    def arm(self) -> None:
        """The next result is kept."""
        self._armed, self._kept = True, None

    def give(self, result: mx.array | None) -> None:
        """The next call returns this and computes nothing; None: it computes again."""
        self._given = result

    def stop(self, at_input: bool) -> None:
        """Calls raise Shown with the module's input, or compute again."""
        self._stops = at_input

    def take(self) -> Any:
        """The kept result, which is then let go; None where the module was not called."""
        kept, self._kept, self._armed = self._kept, None, False
        return kept

    def called(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the tapped module does when it is called. plain: what it did before."""
        if self._stops:
            raise Shown(next(iter((*args, *kwargs.values())), None))
        if self._given is not None:
            given, self._given = self._given, None
            return given
        result = plain(module, *args, **kwargs)
        if self._armed:
            self._kept, self._armed = result, False
        return result


def tapped(module: nn.Module) -> Tap:
    """A tap on a module."""
    plain, tap = type(module), Tap()

    def call(inner: Any, *args: Any, **kwargs: Any) -> Any:
        return tap.called(plain.__call__, inner, *args, **kwargs)

    module.__class__ = type(plain.__name__, (plain,), {"__call__": call})
    return tap


def state_of(result: Any, name: str = "") -> mx.array | None:
    """The hidden state called `name` in what a module returns: itself, or the first of several;
    else None. Of keys and values the heads are put side by side."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if name.partition(".")[0] in LENT and isinstance(first, mx.array) and first.ndim == 4:
        first = first.flatten(2)
    return first if isinstance(first, mx.array) and first.ndim == 3 else None


def inner_of(model: nn.Module) -> nn.Module:
    """The module whose result the output head is given, through any multimodal wrapper."""
    outer = _innermost(model)
    children = (getattr(outer, name, None) for name in ("model", "transformer", "backbone"))
    return _innermost(next((c for c in children if isinstance(c, nn.Module)), outer))


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "language_model", None), nn.Module):
        module = inner
    return module
