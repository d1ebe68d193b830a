"""EAGLE-1, EAGLE-2 and HASS: a layer on the state that the target's head is given.

They differ in how they were trained, and in the trees that they were made for; their files do not.
Source: Li et al., arXiv 2401.15077 and 2406.16858; Zhang et al., arXiv 2408.15766.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..base import Base
from .files import SpeculatorFiles, StoredTensors
from .layers import Layer
from .network import Chain
from .sizes import LayerSizes, Settings, Shapes, layer_sizes

FC = "fc.weight"
WITHOUT = ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight")
"""The first layer is given what comes out of fc as it is."""
UNUSED = ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""The target's own, which some files hold as well, since training leaves both as they are; and what
positions are turned by, which config.json says."""


@dataclass(frozen=True)
class EagleFiles(SpeculatorFiles):
    """A drafter that reads no layer, but what the target's head is given."""

    sizes: LayerSizes


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is one of the three: only tensors tell."""
    known = {_own_name(name) for name in names}
    return {FC, "layers.0.self_attn.q_proj.weight"} <= known and known.isdisjoint(WITHOUT)


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> EagleFiles:
    """See `speculators.read`."""
    settings = Settings(directory / "config.json", config)
    sizes = layer_sizes(settings, None)
    stored = StoredTensors.of(directory, _own_name, UNUSED)
    stored.check_layers(sizes.count)
    stored.check(*_shapes(sizes))
    return EagleFiles(
        directory=directory,
        kind=kind,
        sizes=sizes,
        tapped=(),
        taps=0,
        target_width=sizes.width,
        vocabulary=settings.whole("vocab_size"),
        target_ids=None,
        tensors=stored,
    )


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


def _shapes(sizes: LayerSizes) -> tuple[Shapes, Shapes]:
    """What there has to be, and what there may be."""
    width = sizes.width
    needed: Shapes = {FC: (width, 2 * width)}
    optional: Shapes = {"fc.bias": (width,)}
    for number in range(sizes.count):
        needed |= sizes.shapes(number, width)
        optional |= sizes.optional(number)
    del needed[WITHOUT[0]]
    return needed, optional


class Eagle(Chain):
    """The network of a directory."""

    def __init__(self, files: EagleFiles, target: Base) -> None:
        super().__init__(files, target)
        sizes = files.sizes
        self.layers = [
            Layer(sizes, number, sizes.width, files.tensors) for number in range(sizes.count)
        ]

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says; nothing is normed."""
        both: mx.array = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        return both, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """As Chain says; both are one."""
        return states, states


network = Eagle
