"""Repetition of recurrences over the accepted rows of a pass, without the target's weights.

A recurrent state cannot drop its newest tokens. After a rejection it is restored to the copy from
before the pass, and advanced over the accepted tokens. Their projections were computed in the pass.
Therefore the modules that write the state are called again with the first rows of their arguments.
Each projection inside of them then returns the first rows of its earlier result. MLX is lazy, so a
call computes only what the state depends on: convolutions, gates and the recurrence, but neither
attention nor the output projection. This needs no knowledge of a family. `trials.py` tries it."""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import CacheList

from ..patches import RECORDED, WATCHED


@dataclass(eq=False)
class RecordedCall:
    """A call of a module that writes recurrent state.

    Attributes:
        module: The module.
        args, kwargs: The arguments, among them caches.
        projections: The results of the projections inside, by the id of the module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    projections: dict[int, list[mx.array]] = field(default_factory=dict)


class _Building(threading.local):
    """The recorded or repeated calls of the pass that a thread is building.

    Attributes:
        calls: The recorded calls of the pass, or None if it is not recorded.
        call: The call that is being recorded.
        repeated: The rows that projections return instead of computing them, by module."""

    calls: list[RecordedCall] | None = None
    call: RecordedCall | None = None
    repeated: dict[int, list[mx.array]] | None = None


class Recurrences:
    """The modules of a network that write recurrent state, whose calls can be recorded.

    Args:
        network: The network, whose modules are changed.
        entries: Empty caches of one sequence.
        opaque: The caches among them that cannot drop entries."""

    def __init__(self, network: nn.Module, entries: list[Any], opaque: Sequence[Any]) -> None:
        self._building = _Building()
        writers = _writers(network, entries, opaque)
        inside = {id(module): module for writer in writers for module in writer.modules()}
        # Repeating a module with a matrix would read weights.
        projections = [m for m in inside.values() if getattr(m.get("weight"), "ndim", 0) == 2]
        RECORDED.extend(writers, __call__=self._write)
        RECORDED.extend(projections, __call__=self._project)

    @contextmanager
    def recorded(self) -> Iterator[list[RecordedCall]]:
        """Record the calls of a pass of this thread."""
        calls: list[RecordedCall] = []
        self._building.calls = calls
        try:
            yield calls
        finally:
            self._building.calls = None

    def repeat(
        self,
        calls: Sequence[RecordedCall],
        shape: tuple[int, int],
        sequences: mx.array | None,
        rows: int,
        caches: dict[int, Any],
    ) -> None:
        """Repeat the calls of a pass over its first rows.

        Args:
            calls: The recorded calls.
            shape: The number of sequences and of rows of the pass.
            sequences: The sequences to repeat, (n,) int32, or None for all.
            rows: The number of rows to repeat.
            caches: By the id of each recurrent cache of the pass, the cache to write instead. It
                holds the state of the sequences from before the pass."""

        def first_rows(array: mx.array) -> mx.array:
            return array[:, :rows] if sequences is None else array[sequences, :rows]

        def part(value: Any) -> Any:
            if isinstance(value, CacheList):
                return CacheList(*[caches.get(id(c), _UNWRITTEN) for c in value.caches])
            if not isinstance(value, mx.array):
                return caches.get(id(value), value)
            if value.dtype == mx.bool_:
                return None  # a mask of attention, whose result is not computed
            if value.shape == shape[:1] and sequences is not None:
                return value[sequences]  # one position for each sequence
            return first_rows(value) if value.shape[:2] == shape else value

        for call in calls:
            self._building.repeated = {
                number: list(map(first_rows, results))
                for number, results in call.projections.items()
                if all(result.ndim == 3 and result.shape[:2] == shape for result in results)
            }
            try:
                call.module(*tree_map(part, call.args), **tree_map(part, call.kwargs))
            finally:
                self._building.repeated = None

    def _write(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        building = self._building
        if building.calls is None or building.call is not None:
            return plain(module, *args, **kwargs)
        building.call = RecordedCall(module, args, kwargs)
        building.calls.append(building.call)
        try:
            return plain(module, *args, **kwargs)
        finally:
            building.call = None

    def _project(self, plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        building = self._building
        if building.repeated and (results := building.repeated.get(id(module))):
            return results.pop(0)
        result = plain(module, *args, **kwargs)
        if building.call is not None:
            building.call.projections.setdefault(id(module), []).append(result)
        return result


_UNWRITTEN = SimpleNamespace(offset=0, update_and_fetch=lambda keys, values: (keys, values))
"""A KV cache that writes nothing, for a repeated call that also gets a recurrent cache. The KV
cache is rewound on its own, and no position is part of a recurrent state."""


def _writers(network: nn.Module, entries: list[Any], opaque: Sequence[Any]) -> list[nn.Module]:
    """Return the modules that write caches in `opaque`, a part of `entries`: those that do not pass
    a cache on to a module inside of them. A pass over two tokens is built for it, and nothing is
    computed."""
    watched, calls = set(map(id, opaque)), Counter[int]()
    found: dict[int, nn.Module] = {}

    def observe(plain: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = [
            part
            for value in (*args, *kwargs.values())
            for part in (value.caches if isinstance(value, CacheList) else [value])
        ]
        caches = watched.intersection(map(id, values))
        before = {cache: calls[cache] for cache in caches}
        result = plain(module, *args, **kwargs)
        if any(calls[cache] == count for cache, count in before.items()):
            found[id(module)] = module
        calls.update(caches)
        return result

    modules = network.modules()
    try:
        WATCHED.extend(modules, __call__=observe)
        network(mx.zeros((1, 2), dtype=mx.int32), cache=entries)
    finally:
        for module in modules:
            WATCHED.undo(module)
    return list(found.values())
