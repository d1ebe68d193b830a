"""P-EAGLE: an EAGLE-3 that drafts all its tokens in one pass.

Source: arXiv 2602.01469, and the files that `speculators` and vLLM read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..base import Base
from . import eagle3
from .eagle3 import Eagle3, Eagle3Files
from .files import StoredTensors
from .network import Reading
from .sizes import Settings, Shapes

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


class PEagle(Eagle3):
    """The network of a directory."""

    def __init__(self, files: PEagleFiles, target: Base) -> None:
        super().__init__(files, target)
        self.mask_hidden = mx.zeros(files.tensors[MASK].shape)
        self._mask_token = files.mask_token
        self._depths = files.depths

    @property
    def most(self) -> int:
        """As many tokens as it was trained to draft at once."""
        return self._depths

    def open(self) -> Reading:
        """A sequence of which nothing was read."""
        return PEagleReading(self)

    def masked(self, count: int) -> tuple[mx.array, mx.array]:
        """States and tokens of `count` places that are to be filled."""
        tokens = mx.full((1, count), self._mask_token, dtype=mx.int32)
        return mx.repeat(self.mask_hidden, count, axis=1), tokens


class PEagleReading(Reading):
    """One sequence: what was read waits for the next guess, so that both are one pass."""

    def __init__(self, network: PEagle) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._waiting: tuple[mx.array, mx.array] | None = None
        self._newest: mx.array | None = None
        self._logits: mx.array | None = None
        self._index = 0

    @property
    def length(self) -> int:
        """As Reading says."""
        return super().length + (0 if self._waiting is None else self._waiting[1].shape[1])

    def read(self, hidden: mx.array, following: mx.array) -> None:
        """As Reading says."""
        self._see(0)
        self._waiting = hidden.astype(self._network.dtype), following

    def guess(self, count: int) -> mx.array:
        """As Reading says."""
        masked = self._see(count - 1)
        assert self._newest is not None, "something was read"
        network, states = self._network, mx.concatenate([self._newest, masked], axis=1)
        self._logits = network.over_target(network.own_logits(states))
        self._index = 0
        return self._logits[:, :1]

    def guess_after(self, token: mx.array) -> mx.array:
        """As Reading says; all that is to come was guessed at once."""
        assert self._logits is not None, "the first token was guessed"
        self._index += 1
        return self._logits[:, self._index : self._index + 1]

    def evaluate(self) -> None:
        """As Reading says."""
        self._see(0)
        super().evaluate()

    def _see(self, masked: int) -> mx.array:
        """What waits, and `masked` places behind it, for which it returns what the head is given,
        (1, masked, width)."""
        network, waiting = self._network, self._waiting
        hidden, tokens = network.masked(masked)
        if waiting is not None:
            hidden = mx.concatenate([waiting[0], hidden], axis=1)
            tokens = mx.concatenate([waiting[1], tokens], axis=1)
            self._waiting = None
        rows = tokens.shape[1]
        if rows == 0:
            return mx.zeros((1, 0, network.norm.weight.size), dtype=network.dtype)
        offset = self._rows.advance(tokens, masked).starts[0]
        head, _ = network.step(
            tokens, network.features(hidden), self._caches, offset, self._sources
        )
        if rows > masked:
            self._newest = head[:, rows - masked - 1 : rows - masked]
        return head[:, rows - masked :]


network = PEagle
