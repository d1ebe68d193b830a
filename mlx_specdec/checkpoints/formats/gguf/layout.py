"""What a GGUF file holds, in Hugging Face's words: a configuration and where each tensor lies.

Knows the pieces that every architecture is described with. Knows no architecture and reads nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .header import Damaged, Entry

Read = Callable[[str, int], "np.ndarray[Any, Any]"]
"""(name, at most so many rows) -> the first rows of a tensor, float32."""


@dataclass(frozen=True)
class Place:
    """One tensor. name: in the file. heads: its rows are those of so many rotary heads, in
    llama.cpp's order; 0 where they are in their own."""

    name: str
    heads: int = 0


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

    def take(self, ours: str, name: str, shape: tuple[int, ...], heads: int = 0) -> None:
        """Raises Damaged where the tensor is not there, or has another shape."""
        entry = self.entries.get(name)
        if entry is None:
            raise Damaged(f"lacks the tensor {name}: download it again")
        if entry.shape != shape:
            raise Damaged(
                f"is damaged: {name} has shape {entry.shape} where its metadata asks for {shape}"
            )
        self.places[ours] = Place(name, heads)

    def take_if_there(self, ours: str, name: str, shape: tuple[int, ...], heads: int = 0) -> bool:
        """As `take` where the tensor is there, and gives whether it is."""
        if name in self.entries:
            self.take(ours, name, shape, heads)
        return name in self.entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Of one tensor. Raises Damaged where it is not there."""
        if name not in self.entries:
            raise Damaged(f"lacks the tensor {name}: download it again")
        return self.entries[name].shape

    def finish(self, config: Mapping[str, Any], left: tuple[str, ...] = ()) -> Layout:
        """Raises Damaged for a tensor that nobody took and that is not left out on purpose."""
        taken = {place.name for place in self.places.values()}
        extra = self.entries.keys() - taken - set(left)
        if extra:
            raise Damaged(
                f"holds {min(extra)}, which a {config['model_type']} model does not have here"
            )
        return Layout(config, self.places, tuple(name for name in left if name in self.entries))


def check_layers(layers: int, entries: Mapping[str, Entry]) -> int:
    """The same number. Raises Damaged where there are more layers than tensors."""
    if not 1 <= layers <= len(entries):
        raise Damaged(f"is damaged: it claims {layers} layers and has {len(entries)} tensors")
    return layers
