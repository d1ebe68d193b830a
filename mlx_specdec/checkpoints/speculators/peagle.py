"""P-EAGLE: an EAGLE-3 that drafts all its tokens in one pass.

Source: arXiv 2602.01469, and the files that `speculators` and vLLM read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import eagle3
from .eagle3 import Eagle3Files
from .settings import Settings
from .sizes import Shapes
from .stored import StoredTensors

MASK = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""What `speculators`, AMD's and Amazon's files call the token of a place that is to be filled."""
USUAL_DEPTHS = 8
"""Tokens at once that training looks at where nothing says how many."""


@dataclass(frozen=True)
class PEagleFiles(Eagle3Files):
    """mask_token: what stands in the place of a token that is not known. depths: how many tokens it
    was trained to draft."""

    mask_token: int
    depths: int


def recognizes(kind: str, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether this is a P-EAGLE."""
    # An EAGLE-3 masks no token.
    masks = any(config.get(name) is not None for name in MASK_TOKENS)
    return MASK in names or (masks and eagle3.recognizes(kind, config, names))


def read(kind: str, directory: Path, config: Mapping[str, Any]) -> PEagleFiles:
    """See `speculators.read`."""
    chain = eagle3.read(kind, directory, config, _shapes)
    settings = Settings(directory / "config.json", config, config.get("transformer_layer_config"))
    said = (name for name in MASK_TOKENS if settings.get(name) is not None)
    name = next(said, MASK_TOKENS[0])
    mask_token = settings.whole(name, least=0)
    if mask_token >= chain.vocabulary:
        raise settings.wrong(name, f"one of the target's {chain.vocabulary} tokens")
    tensors = chain.tensors.changed({MASK: chain.tensors[MASK].reshape(1, 1, -1)})
    own = {**vars(chain), "tensors": tensors}
    return PEagleFiles(**own, mask_token=mask_token, depths=_depths(settings))


def expected(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """The tensors of such a drafter, as far as config.json tells."""
    shapes = eagle3.expected(kind, directory, config)
    return shapes | {MASK: (1, 1, shapes["fc.weight"][1])}


def _shapes(stored: StoredTensors, features: int) -> Shapes:
    """The state of a token that is not known; it may have an axis of size 1 more or less."""
    shape = stored.shapes.get(MASK, ())
    flat = shape if {*shape[:-1]} <= {1} and shape[-1:] == (features,) else (1, 1, features)
    return {MASK: flat}


def _depths(settings: Settings) -> int:
    told = settings.get("speculators_config")
    methods = told.get("proposal_methods") if isinstance(told, Mapping) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    return Settings(settings.file, first).whole("speculative_tokens", USUAL_DEPTHS)
