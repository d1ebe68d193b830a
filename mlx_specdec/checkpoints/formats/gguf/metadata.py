"""Typed answers from a GGUF file's metadata, with one sentence for what is missing or wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from ..reader import Malformed
from .header import LARGEST_EXTENT as _MOST

Value = TypeVar("Value")


@dataclass(frozen=True)
class Kind(Generic[Value]):
    """What a value has to be, in words; whether one is that, and what is made of it."""

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Value]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


COUNT = Kind("one whole number", lambda value: type(value) is int and 0 <= value <= _MOST, int)
NUMBER = Kind("a number", _is_number, float)
POSITIVE = Kind("a number above 0", lambda value: _is_number(value) and value > 0, float)
FLAG = Kind("true or false", lambda value: type(value) is bool, bool)
TEXT = Kind("a text", lambda value: type(value) is str, str)
TEXTS = Kind("a list of texts", lambda value: isinstance(value, list), list[str])
NUMBERS = Kind("a list of numbers", lambda value: isinstance(value, np.ndarray), np.asarray)


class Metadata:
    """What one file says of itself. `architecture`: as llama.cpp calls it, for example "llama"."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises Malformed where there is no architecture."""
        self._values = values
        self.architecture = self.get("general.architecture", TEXT)

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def get(self, key: str, kind: Kind[Value], default: Value | None = None) -> Value:
        """A value, which has to be there unless there is a default.

        key: one that begins with a dot belongs to the architecture. Raises Malformed.
        """
        key = self._full(key)
        value = self._values.get(key, default)
        if value is None:
            raise Malformed(f"has no {key} in its metadata: it does not describe a model")
        # Some writers store one number per layer; where all are the same they are one number.
        if isinstance(value, np.ndarray) and kind is not NUMBERS and len({*value.tolist()}) == 1:
            value = value[0].item()
        if not kind.fits(value):
            value = value.tolist() if isinstance(value, np.ndarray) else value
            raise Malformed(f"has {value!r:.40} for {key:.100}, which has to be {kind.words}")
        return kind.read(value)

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key
