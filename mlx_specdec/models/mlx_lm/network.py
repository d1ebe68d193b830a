"""A network of mlx-lm, and hidden states of it that it was written without showing."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from ...errors import CheckpointError, OptionError
from ...interfaces import FINAL, Scores
from ..base import layer_of
from ..cpu_layers import begin
from ..patches import TAPS

LENT = {"keys": "k_norm", "values": "v_norm"}
"""What a layer's attention calls the modules that keys and values come out of, head by head."""


def lent_of(name: str, layers: Sequence[Any]) -> nn.Module | None:
    """Return the module whose output a layer's keys or values are, by their name, or None."""
    part, _, number = name.partition(".")
    if part not in LENT or not number.isdecimal() or int(number) >= len(layers):
        return None
    return getattr(getattr(layers[int(number)], "self_attn", None), LENT[part], None)


class Shown(Exception):
    """Ends a call of a model as soon as the input of a module is known."""

    def __init__(self, state: Any) -> None:
        self.state = state


class Tap(threading.local):
    """How a tapped module answers calls, by thread. stops: raise Shown with the module's input.
    begins: the device begins with the result at once, unless `lazy` is set. given: the result of
    the next call, which computes nothing then."""

    stops = begins = lazy = False
    given: mx.array | None = None
    _armed = False
    _result: Any = None

    def arm(self) -> None:
        self._armed, self._result = True, None

    def take(self) -> Any:
        """Return the stored result and let go of it; None where the module was not called."""
        result, self._result, self._armed = self._result, None, False
        return result

    def called(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.stops:
            raise Shown(next(iter((*args, *kwargs.values())), None))
        if self.given is not None:
            given, self.given = self.given, None
            return given
        result = plain(module, *args, **kwargs)
        if self.begins and not self.lazy and (state := state_of(result)) is not None:
            begin(state)
        if self._armed:
            self._result, self._armed = result, False
        return result


def tapped(*modules: nn.Module) -> Tap:
    """Return the tap that modules share; those of one class stay of one class."""
    tap = Tap()
    TAPS.extend(modules, __call__=tap.called)
    return tap


def state_of(result: Any, name: str = "") -> mx.array | None:
    """Return the hidden state in the result of a module, itself or the first of several, or None.
    The heads of keys and values are put side by side."""
    first = result[0] if isinstance(result, (tuple, list)) and result else result
    if name.partition(".")[0] in LENT and isinstance(first, mx.array) and first.ndim == 4:
        first = first.flatten(2)
    return first if isinstance(first, mx.array) and first.ndim == 3 else None


def inner_of(model: nn.Module) -> nn.Module:
    """Return the module whose result is the input of the output head, in any multimodal wrapper."""
    outer = _innermost(model)
    children = (getattr(outer, name, None) for name in ("model", "transformer", "backbone"))
    return _innermost(next((c for c in children if isinstance(c, nn.Module)), outer))


def _innermost(module: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(module, "language_model", None), nn.Module):
        module = inner
    return module


def type_name(network: nn.Module) -> str:
    return type(network).__module__.rpartition(".")[2]


class TappedNetwork:
    """A loaded module of mlx-lm, called as `network(tokens, cache=entries)`. group: of the ranks
    that share it; passes are then submitted at once. pipeline: they share its layers."""

    def __init__(
        self, network: nn.Module, group: mx.distributed.Group | None = None, *, pipeline: bool
    ) -> None:
        self.network = network
        self.group = group
        self._pipeline = pipeline
        self._taps: dict[str, Tap] = {}
        self._first: Tap | None = None
        # Ranks must submit the same in the same order.
        self._each = tapped(*network.layers) if group is None and not pipeline else Tap()
        self._state: tuple[int, mx.Dtype] | None = None
        # Shapes are known as soon as the graph is built; nothing is computed here.
        probe = network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(network))
        self.vocabulary: int = probe.shape[-1]  # padding included
        self._logits_dtype = probe.dtype
        masked = getattr(network, "_dummy_tokenizer_ids", None)  # of phi3small
        if masked is not None and (most := max(masked.tolist())) >= self.vocabulary:
            raise CheckpointError(
                f"mlx-lm masks token ids up to {most} of this type of model, and config.json has a "
                f"vocabulary of {self.vocabulary}: to write past its end would end the process"
            )

    @property
    def width(self) -> int:
        """Width of the hidden states. Raises OptionError where a model does not show them."""
        return self._seen_state()[0]

    @property
    def state_dtype(self) -> mx.Dtype:
        """Dtype of the hidden states, or of the logits if the model does not show the former."""
        try:
            return self._seen_state()[1]
        except OptionError:
            return self._logits_dtype

    @property
    def layers(self) -> int:
        return len(self.network.layers)  # of a pipeline those of this rank

    def embed(self, tokens: mx.array) -> mx.array:
        """(batch, m) int32 -> (batch, m, width), the input of the first layer. Raises OptionError
        where a model does not show it."""
        if self._pipeline:
            raise self._closed("what their first layer is given, in a pipeline")
        # Only a call of the model shows what it does to its embedding.
        self._first = self._first or tapped(self.network.layers[0])
        self._first.stops, state = True, None
        try:
            self.network(tokens, cache=make_prompt_cache(self.network))
        except Shown as shown:
            state = state_of(shown.state)
        finally:
            self._first.stops = False
        if state is None:
            raise self._closed("what their first layer is given")
        return state

    def head(self, states: mx.array) -> mx.array:
        """(batch, m, width), as FINAL is -> logits. Raises OptionError as `width` does."""
        # Heads are scaled, soft-capped or tied: only a call of the model shows how.
        tap = self.tap(FINAL)
        tap.given = states
        try:
            logits: mx.array = self.network(mx.zeros(states.shape[:2], dtype=mx.int32))
        finally:
            tap.given = None
        return logits

    @contextmanager
    def lazily(self) -> Iterator[None]:
        """Let passes of this thread compute nothing until a result is read, and then no layer that
        the result does not depend on. Ranks submit their passes all the same."""
        self._each.lazy = True
        try:
            yield
        finally:
            self._each.lazy = False

    def run(self, tokens: mx.array, entries: list[Any] | None, taps: Sequence[str] = ()) -> Scores:
        """Run a pass over (batch, m) int32. entries: the caches; None for whole texts."""
        # Whole texts are trained on.
        self._each.begins = entries is not None
        try:
            return self._run(tokens, entries, taps)
        finally:
            self._each.begins = False

    def _run(self, tokens: mx.array, entries: list[Any] | None, taps: Sequence[str]) -> Scores:
        if not taps and self.group is None:
            return Scores(self.network(tokens, cache=entries))
        together = () if self.group is None or FINAL in taps else (FINAL,)
        armed = {name: self.tap(name) for name in (*taps, *together)}
        for tap in armed.values():
            tap.arm()
        logits = self.network(tokens, cache=entries)
        states = {name: state_of(tap.take(), name) for name, tap in armed.items()}
        if self.group is not None:
            # In the order of passes on every rank, whoever looks at the result, and when.
            mx.async_eval(states[FINAL])
        return Scores(logits, {name: state for name, state in states.items() if state is not None})

    def tap(self, name: str) -> Tap:
        """Return the tap on a hidden state. Raises OptionError for one that is not shown."""
        if name not in self._taps:
            inner = name == FINAL
            if self._pipeline and not inner:
                raise OptionError(
                    f"in a pipeline no rank has all layers, and what is {name} is not sent to the "
                    "drafter: take distributed tensor, or another drafter"
                )
            module = inner_of(self.network) if inner else lent_of(name, self.network.layers)
            if module is None:
                module = self.network.layers[layer_of(name, self.layers)]
            tap = tapped(module)
            tap.arm()
            self.network(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(self.network))
            state = state_of(tap.take(), name)
            # Some models keep the head inside: what comes out of them are logits.
            if state is None or (inner and state.shape[-1] == self.vocabulary):
                raise self._closed("the input of their head" if inner else f"what is {name}")
            if inner:
                self._state = (state.shape[-1], state.dtype)
            self._taps[name] = tap
        return self._taps[name]

    def _closed(self, what: str) -> OptionError:
        return OptionError(f"models of type {type_name(self.network)} do not show {what}")

    def _seen_state(self) -> tuple[int, mx.Dtype]:
        self.tap(FINAL)
        return self._state or (0, mx.float32)
