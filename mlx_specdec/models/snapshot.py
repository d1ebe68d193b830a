"""A copy of a model's mlx-lm caches, to begin other sequences with.

Of whatever class they are: `copy.deepcopy` shares memory until either side is written to. What is
a view of something larger gets memory of its own, so that the copy takes what its arrays say.
"""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx


def snapshot(entries: list[Any]) -> tuple[list[Any], tuple[mx.array, ...]]:
    """The copy, lazily, and all arrays in it."""
    taken: dict[int, tuple[mx.array, mx.array]] = {}
    copied = _with_own_arrays(copy.deepcopy(entries), taken)
    return copied, tuple(own for _, own in taken.values())


def _with_own_arrays(part: Any, taken: dict[int, tuple[mx.array, mx.array]]) -> Any:
    """The same thing; arrays that caches share stay shared. taken: by the identity of the array
    before, which is kept so that no other one gets it."""
    if isinstance(part, mx.array):
        return taken.setdefault(id(part), (part, mx.contiguous(part)))[1]
    if isinstance(part, list):
        part[:] = [_with_own_arrays(each, taken) for each in part]
    elif isinstance(part, tuple):
        return tuple(_with_own_arrays(each, taken) for each in part)
    elif isinstance(part, dict):
        part.update({name: _with_own_arrays(each, taken) for name, each in part.items()})
    elif hasattr(part, "__dict__"):
        for name, each in vars(part).items():
            setattr(part, name, _with_own_arrays(each, taken))
    return part
