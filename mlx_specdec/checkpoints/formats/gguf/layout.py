"""What a GGUF file says of its model: typed metadata, and where each tensor of ours lies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ...tensors import LARGEST_EXTENT, Malformed
from .header import Entry

MOST_LAYERS = 1000
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Kind(Generic[Value]):
    """What a value has to be, in words; whether one is that, and what is made of it."""

    words: str
    fits: Callable[[Any], bool]
    read: Callable[[Any], Value]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


COUNT = Kind("one whole number", lambda v: type(v) is int and 0 <= v <= LARGEST_EXTENT, int)
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
        """A value, which has to be there unless there is a default. key: one that begins with a dot
        belongs to the architecture. Raises Malformed."""
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


@dataclass(frozen=True)
class Place:
    """One tensor. name: in the file. shape: what it is to have; the file may leave out a first axis
    of 1. heads: its rows are those of so many rotary heads, in llama.cpp's order; 0 where they are
    in their own. excess: what llama.cpp's converter added to every value."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    excess: float = 0


@dataclass
class Finder:
    """Collects places while an architecture is described; each tensor has to be as expected.

    entries: the file's tensors by name. read: gives at most so many first rows of one, float32.
    """

    entries: Mapping[str, Entry]
    read: Callable[[str, int], np.ndarray[Any, Any]]
    places: dict[str, Place] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor. Raises Malformed where it is not there."""
        if name not in self.entries:
            raise Malformed(f"lacks the tensor {name}: download it again")
        return self.entries[name].shape

    def take(self, ours: str, place: Place) -> None:
        """Raises Malformed where the tensor is not there, or has another shape."""
        shape, wanted = self.shape(place.name), place.shape
        if shape != wanted and (1, *shape) != wanted:
            raise Malformed(
                f"is damaged: {place.name} has shape {shape} where its metadata asks for {wanted}"
            )
        self.places[ours] = place

    def check_layers(self, layers: int) -> int:
        """The same number. Raises Malformed where no model has so many layers."""
        count = len(self.entries)
        if not 1 <= layers <= min(count, MOST_LAYERS):
            raise Malformed(f"is damaged: it claims {layers} layers and has {count} tensors")
        return layers

    @property
    def left(self) -> set[str]:
        """Names of the tensors that nobody took."""
        return self.entries.keys() - {place.name for place in self.places.values()}

    def check_left(self, model_type: str, *known: str) -> None:
        """Raises Malformed for a tensor that nobody took and that is not left out on purpose."""
        if extra := self.left - {*known}:
            raise Malformed(f"holds {min(extra)}, which a {model_type} model does not have here")


def tensor_names(architecture: str, layers: int) -> Callable[[str], str]:
    """What llama.cpp calls a tensor, by Hugging Face's name. Raises Malformed."""
    from gguf.constants import MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    if architecture not in numbers:
        raise Malformed(f"holds {architecture} weights, which the gguf package is too old for")
    names = get_tensor_name_map(numbers[architecture], layers)

    def theirs(ours: str) -> str:
        name = names.get_name(ours, (".weight", ".bias"))
        if name is None:
            raise Malformed(f"cannot hold {ours}, which the model needs")
        return name

    return theirs
