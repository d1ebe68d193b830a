"""What a GGUF file holds, in Hugging Face's words: a configuration and where each tensor lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..reader import Malformed
from .header import Entry

MOST_LAYERS = 1000
Read = Callable[[str, int], "np.ndarray[Any, Any]"]
"""(name, at most so many rows) -> the first rows of a tensor, float32."""


@dataclass(frozen=True)
class Place:
    """One tensor. name: in the file. shape: what it is to have; the file may leave out a first axis
    of 1. heads: its rows are those of so many rotary heads, in llama.cpp's order; 0 where they are
    in their own. excess: what llama.cpp's converter added to every value."""

    name: str
    shape: tuple[int, ...]
    heads: int = 0
    excess: float = 0


@dataclass(frozen=True)
class Layout:
    """config: what config.json would say. places: our name -> where the tensor lies. left: names of
    the tensors that are not needed, because the configuration says what they say."""

    config: Mapping[str, Any]
    places: Mapping[str, Place]
    left: tuple[str, ...] = ()


@dataclass
class Finder:
    """Collects places while an architecture is described; each tensor has to be as expected.

    entries: the file's tensors by name.
    """

    entries: Mapping[str, Entry]
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
        """The same number. Raises Malformed where there are more layers than tensors, or than any
        model has."""
        count = len(self.entries)
        if not 1 <= layers <= min(count, MOST_LAYERS):
            raise Malformed(f"is damaged: it claims {layers} layers and has {count} tensors")
        return layers

    def finish(self, config: Mapping[str, Any], left: tuple[str, ...] = ()) -> Layout:
        """Raises Malformed for a tensor that nobody took and that is not left out on purpose."""
        extra = self.entries.keys() - {place.name for place in self.places.values()} - {*left}
        if extra:
            raise Malformed(
                f"holds {min(extra)}, which a {config['model_type']} model does not have here"
            )
        return Layout(config, self.places, tuple(name for name in left if name in self.entries))


def tensor_names(architecture: str, layers: int) -> Callable[[str], str]:
    """What llama.cpp calls a tensor, by Hugging Face's name. Raises Malformed for one that it has
    not."""
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
