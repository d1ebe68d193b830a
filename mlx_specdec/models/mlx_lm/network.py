"""A network of mlx-lm, and access to its hidden states, which mlx-lm does not return."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...errors import OptionError
from ...types import FINAL, Scores
from ..base import family_of, layer_of
from ..cpu_layers import begin
from ..patches import HIDDEN_STATES

LENT = {"keys": "k_norm", "values": "v_norm"}
"""Names, in a layer's attention, of the modules that return the keys and values of each head."""


def lent_of(name: str, layers: Sequence[Any]) -> nn.Module | None:
    """Return the module that computes the keys or values of a layer, or None if there is none.
    name: Such as "keys.0"."""
    part, _, number = name.partition(".")
    if part not in LENT or not number.isdecimal() or int(number) >= len(layers):
        return None
    return getattr(getattr(layers[int(number)], "self_attn", None), LENT[part], None)


class StopPass(Exception):
    """An exception that ends a call of a model as soon as the input of a module is known."""

    def __init__(self, state: Any) -> None:
        self.state = state


class Capture(threading.local):
    """The state of a captured module in each thread: how its next calls behave.

    Attributes:
        stops: Raise StopPass with the module's input instead of calling the module.
        begins: Let the device compute the result at once, unless `lazy` is set.
        substitute: Return this array from the next call, instead of calling the module."""

    stops = begins = lazy = False
    substitute: mx.array | None = None
    _armed = False
    _result: Any = None

    def arm(self) -> None:
        """Store the result of the module's next call."""
        self._armed, self._result = True, None

    def take(self) -> Any:
        """Return and forget the stored result, or return None if the module was not called."""
        result, self._result, self._armed = self._result, None, False
        return result

    def called(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Handle a call of the module. plain: The method that would handle it otherwise."""
        if self.stops:
            raise StopPass(next(iter((*args, *kwargs.values())), None))
        if self.substitute is not None:
            result, self.substitute = self.substitute, None
            return result
        result = plain(module, *args, **kwargs)
        if self.begins and not self.lazy and (state := state_of(result)) is not None:
            begin(state)
        if self._armed:
            self._result, self._armed = result, False
        return result


def capturing(*modules: nn.Module) -> Capture:
    """Install one capture on all of these modules and return it. Modules of one class stay of one
    class."""
    capture = Capture()
    HIDDEN_STATES.extend(modules, __call__=capture.called)
    return capture


def state_of(result: Any, name: str = "") -> mx.array | None:
    """Return the hidden state, (batch, rows, width), in a module's result, or None if there is
    none. Keys and values, (batch, heads, rows, size), are joined to one width."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if name.partition(".")[0] in LENT and isinstance(first, mx.array) and first.ndim == 4:
        first = first.flatten(2)
    return first if isinstance(first, mx.array) and first.ndim == 3 else None


def inner_of(model: nn.Module) -> nn.Module:
    """Return the module whose result is the output head's input, also within multimodal
    wrappers."""
    outer = _innermost(model)
    children = (getattr(outer, name, None) for name in ("model", "transformer", "backbone"))
    return _innermost(next((c for c in children if isinstance(c, nn.Module)), outer))


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "language_model", None), nn.Module):
        module = inner
    return module


class CapturingNetwork:
    """A loaded network of mlx-lm whose hidden states can be read.

    Args:
        network: The network, which is called as `network(tokens, cache=entries)`.
        group: The ranks that share the network, if any. Passes are then submitted at once.
        pipeline: Whether each rank has some of the layers."""

    def __init__(
        self, network: nn.Module, group: mx.distributed.Group | None = None, *, pipeline: bool
    ) -> None:
        self.network = network
        self.group = group
        self._pipeline = pipeline
        self._captures: dict[str, Capture] = {}
        self._first: Capture | None = None
        # All ranks must submit the same operations in the same order, so no layer is captured.
        self._layers_capture = (
            capturing(*network.layers) if group is None and not pipeline else Capture()
        )
        # Shapes are known as soon as the graph is built; nothing is computed here.
        probe = network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(network))
        self.vocabulary: int = probe.shape[-1]  # padding included
        # The width and the dtype of the hidden states, as soon as FINAL is captured.
        self._state = 0, probe.dtype

    @property
    def width(self) -> int:
        """Width of the hidden states. Raises OptionError if the model hides them."""
        self.capture(FINAL)
        return self._state[0]

    @property
    def state_dtype(self) -> mx.Dtype:
        """Dtype of the hidden states, or of the logits if the model hides the hidden states."""
        with suppress(OptionError):
            self.capture(FINAL)
        return self._state[1]

    @property
    def layers(self) -> int:
        return len(self.network.layers)  # in a pipeline, the layers of this rank

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the first layer's input, (batch, m, width), for tokens, (batch, m) int32. Raises
        OptionError if the model hides it."""
        if self._pipeline:
            raise self._closed("what their first layer is given, in a pipeline")
        # Models may scale embeddings or add to them, so call the model up to the first layer.
        self._first = self._first or capturing(self.network.layers[0])
        self._first.stops, state = True, None
        try:
            self.network(tokens, cache=make_prompt_cache(self.network))
        except StopPass as stop:
            state = state_of(stop.state)
        finally:
            self._first.stops = False
        if state is None:
            raise self._closed("what their first layer is given")
        return state

    def head(self, states: mx.array) -> mx.array:
        """Return logits, (batch, m, vocabulary), for FINAL hidden states, (batch, m, width). Raises
        OptionError if the model hides the input of its head."""
        # Heads may be scaled, soft-capped or tied, so call the model with its last state replaced.
        capture = self.capture(FINAL)
        capture.substitute = states
        try:
            logits: mx.array = self.network(mx.zeros(states.shape[:2], dtype=mx.int32))
        finally:
            capture.substitute = None
        return logits

    @contextmanager
    def lazily(self) -> Iterator[None]:
        """Keep this thread's passes lazy: they compute nothing until a result is read, and then
        only the layers that the result depends on. Ranks that share a model submit passes all the
        same."""
        self._layers_capture.lazy = True
        try:
            yield
        finally:
            self._layers_capture.lazy = False

    def run(
        self, tokens: mx.array, entries: list[Any] | None, hidden: Sequence[str] = ()
    ) -> Scores:
        """Run a pass.

        Args:
            tokens: (batch, m) int32.
            entries: The caches, or None for complete sequences, as in training.
            hidden: Names of the hidden states to return."""
        together = () if self.group is None or FINAL in hidden else (FINAL,)
        armed = {name: self.capture(name) for name in (*hidden, *together)}
        for capture in armed.values():
            capture.arm()
        # Training differentiates passes without caches, so these must stay lazy.
        self._layers_capture.begins = entries is not None
        try:
            logits = self.network(tokens, cache=entries)
        finally:
            self._layers_capture.begins = False
        states = {name: state_of(capture.take(), name) for name, capture in armed.items()}
        if self.group is not None:
            # Submit now, so that all ranks submit passes in the same order.
            mx.async_eval(states[FINAL])
        return Scores(logits, {name: state for name, state in states.items() if state is not None})

    def capture(self, name: str) -> Capture:
        """Return the capture of a hidden state. Raises OptionError if the model hides it."""
        if name not in self._captures:
            is_final = name == FINAL
            if self._pipeline and not is_final:
                raise OptionError(
                    f"in a pipeline no rank has all layers, and what is {name} is not sent to the "
                    "drafter: take distributed tensor, or another drafter"
                )
            module = inner_of(self.network) if is_final else lent_of(name, self.network.layers)
            if module is None:
                module = self.network.layers[layer_of(name, self.layers)]
            capture = capturing(module)
            capture.arm()
            self.network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(self.network))
            state = state_of(capture.take(), name)
            # In some models the inner module contains the head, and returns logits.
            if state is None or (is_final and state.shape[-1] == self.vocabulary):
                raise self._closed("the input of their head" if is_final else f"what is {name}")
            if is_final:
                self._state = (state.shape[-1], state.dtype)
            self._captures[name] = capture
        return self._captures[name]

    def _closed(self, what: str) -> OptionError:
        return OptionError(f"models of type {family_of(self.network)} do not show {what}")
