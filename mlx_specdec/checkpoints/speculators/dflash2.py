"""DFlash 2: DFlash 1 with short convolutions around each part of a layer, and a selector that walks
through each slot's likeliest tokens.

Source: z-lab/dflash, and the files that `speculators` writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from . import dflash
from .dflash import BlockFiles
from .settings import Settings, is_named, nested
from .sizes import LayerSizes, Shapes

SELECTOR, CONVOLUTIONS = "candidate_selector", ("attention_conv", "mlp_conv")
CODEBOOKS = tuple(f"{SELECTOR}.{part}_codebook.weight" for part in ("predecessor", "successor"))


@dataclass(frozen=True)
class DFlash2Files(BlockFiles):
    """reach: how many slots a convolution looks at. group_size: how many numbers of a state share
    what the state says of the convolution. top_k: how many tokens of a slot the selector weighs."""

    reach: int
    group_size: int
    top_k: int


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a DFlash 2."""
    return is_named(config, ".*DFlash2.*") or bool(nested(config).get("selector_rank"))


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> DFlash2Files:
    """See `speculators.read`."""
    block = dflash.read(kind, directory, config, _shapes)
    settings = Settings(directory / "config.json", config.get("dflash_config"), config)
    top_k = settings.whole("selector_top_k", 16)
    if block.target_ids is not None:
        raise settings.wrong("draft_vocab_size", "the target's whole vocabulary")
    if top_k > block.vocabulary:
        raise settings.wrong("selector_top_k", f"at most the {block.vocabulary} tokens there are")
    return DFlash2Files(
        **{each.name: getattr(block, each.name) for each in fields(block)},
        reach=settings.whole("conv_kernel_size", 2),
        group_size=settings.whole("conv_group_size", 16),
        top_k=top_k,
    )


def expected(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """As dflash has it."""
    return dflash.expected(kind, directory, config, _shapes)


def _shapes(settings: Settings, sizes: LayerSizes, vocabulary: int) -> Shapes:
    """What there has to be beside the tensors of DFlash 1."""
    reach, group = settings.whole("conv_kernel_size", 2), settings.whole("conv_group_size", 16)
    rank, width = settings.whole("selector_rank", 256), sizes.width
    if width % group:
        raise settings.wrong("conv_group_size", f"a divisor of the width {width}")
    shapes: Shapes = dict.fromkeys(CODEBOOKS, (vocabulary, rank))
    shapes[f"{SELECTOR}.hidden_projection.weight"] = (rank, width)
    for number in range(sizes.count):
        for part in CONVOLUTIONS:
            name = f"layers.{number}.{part}"
            shapes[f"{name}.base_kernel"] = (2, reach, width)
            shapes[f"{name}.kernel_projection.weight"] = (2 * reach * (width // group), width)
    return shapes
