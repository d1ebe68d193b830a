"""Typed answers from a GGUF file's metadata, with one sentence for each that is missing or wrong.

Knows how keys are built (ARCHITECTURE.key) and what kinds of values there are. Knows no
architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .header import LARGEST_EXTENT, Damaged


class Metadata:
    """What one file says of itself. `architecture`: as llama.cpp calls it, for example "llama"."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Raises Damaged where there is no architecture."""
        self._values = values
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._full(key) in self._values

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 on. A key that begins with a dot belongs to the architecture."""
        value = self._get(key, default)
        # Some writers store one number per layer; where all are the same they are one number.
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()
        if isinstance(value, np.ndarray):
            raise Damaged(f"has {self._full(key)} different for each layer, which is not supported")
        if type(value) is not int or not 0 <= value <= LARGEST_EXTENT:
            raise self._wrong(key, "a whole number", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, "a number", value)
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.number(key, default)
        if value <= 0:
            raise self._wrong(key, "a number above 0", value)
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._get(key, default)
        if type(value) is not bool:
            raise self._wrong(key, "true or false", value)
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if type(value) is not str:
            raise self._wrong(key, "a text", value)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings, [] where there is none."""
        value = self._get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, "a list of texts", value)
        return value

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """A list of numbers, empty where there is none."""
        value = self._get(key, np.zeros(0))
        if not isinstance(value, np.ndarray):
            raise self._wrong(key, "a list of numbers", value)
        return value

    def _full(self, key: str) -> str:
        return f"{self.architecture}{key}" if key.startswith(".") else key

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(self._full(key), default)
        if value is None:
            raise Damaged(f"has no {self._full(key)} in its metadata: it does not describe a model")
        return value

    def _wrong(self, key: str, wanted: str, value: Any) -> Damaged:
        return Damaged(f"has {value!r:.40} for {self._full(key):.100}, which has to be {wanted}")
