"""EAGLE-1, EAGLE-2 and HASS: a layer on the inputs of the target's head. They differ in how they
were trained, and in the trees that they were made for; their files do not. Source: Li et al., arXiv
2401.15077 and 2406.16858; Zhang et al., arXiv 2408.15766."""

from collections.abc import Collection
from pathlib import Path

import mlx.core as mx

from ...checkpoints.files import Weights
from .config import Settings, layer_sizes
from .files import DrafterFiles, StoredTensors
from .layers import Layer
from .network import Chain, Config, Kind

UNUSED = ("embed_tokens.weight", "lm_head.weight", "layers.0.self_attn.rotary_emb.inv_freq")
"""The target's own, which some files repeat, since training leaves both as they are; and the
frequencies of positions, which config.json tells."""


def recognizes(config: Config, names: Collection[str]) -> bool:
    """Return whether this is one of the three: only tensors tell."""
    known = {_own_name(name) for name in names}
    absent = {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    return {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= known and known.isdisjoint(absent)


def read(directory: Path, config: Config, weights: Weights | None) -> DrafterFiles:
    settings = Settings(directory / "config.json", config)
    sizes = layer_sizes(settings, None)
    return DrafterFiles(
        directory=directory,
        kind="eagle",
        sizes=sizes,
        target_width=sizes.width,
        vocabulary=int(settings["vocab_size"]),
        tensors=StoredTensors.of(directory, weights, _own_name, UNUSED),
    )


def _own_name(name: str) -> str:
    return name.removeprefix("model.")


class Eagle(Chain):
    """The network of a directory. Its first layer has no norm: it is given the output of fc."""

    normed = False

    def __init__(self, files: DrafterFiles) -> None:
        super().__init__(files)
        sizes, present = files.sizes, files.tensors
        self.layers = [
            Layer(sizes, number, sizes.width, present, normed=number > 0)
            for number in range(sizes.count)
        ]

    def first(self, tokens: mx.array, states: mx.array) -> tuple[mx.array, mx.array]:
        both: mx.array = self.fc(mx.concatenate([self.embed(tokens), states], axis=-1))
        return both, both

    def ends(self, states: mx.array) -> tuple[mx.array, mx.array]:
        return states, states


EAGLE = Kind("eagle", recognizes, read, Eagle, by_speculators=False)
