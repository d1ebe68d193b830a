"""P-EAGLE: an EAGLE-3 that drafts all its tokens in one pass. Source: arXiv 2602.01469, and the
files that `speculators` and vLLM read."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from ...checkpoints.files import Weights
from . import eagle3
from .config import Settings
from .eagle3 import IDS, Eagle3, Eagle3Files
from .network import Config, Kind, Reading

MASK = "mask_hidden"
MASK_TOKENS = ("mask_token_id", "pard_token", "ptd_token_id")
"""The mask token's name in the files of `speculators`, AMD and Amazon."""
USUAL_DEPTHS = 8
"""Tokens drafted at once where nothing says how many."""


@dataclass(frozen=True, kw_only=True)
class PEagleFiles(Eagle3Files):
    """mask_token: stands in the place of a token that is not known. depths: how many tokens it was
    trained to draft."""

    mask_token: int
    depths: int


def recognizes(config: Config, names: Collection[str]) -> bool:
    # An EAGLE-3 masks no token.
    masks = any(config.get(name) is not None for name in MASK_TOKENS)
    return MASK in names or (masks and eagle3.recognizes(config, names))


def read(directory: Path, config: Config, weights: Weights | None) -> PEagleFiles:
    chain = eagle3.read(directory, config, weights, "peagle")
    stated = config.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, Mapping) else None
    layer = config.get("transformer_layer_config")
    settings = Settings(directory / "config.json", config, layer, methods and methods[0])
    name = next((each for each in MASK_TOKENS if each in settings), MASK_TOKENS[0])
    depths = max(1, int(settings.get("speculative_tokens", USUAL_DEPTHS)))
    mask_token = settings.token(name, chain.vocabulary)
    return PEagleFiles(**vars(chain), mask_token=mask_token, depths=depths)


class PEagle(Eagle3):
    """The network of a directory."""

    def __init__(self, files: PEagleFiles) -> None:
        super().__init__(files)
        # Some files have an axis of size 1 more or less.
        axes = len(files.tensors.shapes.get(MASK, (1, 1, 1)))
        self.mask_hidden = mx.zeros((1,) * (axes - 1) + (files.inputs,))
        self.mask_token = files.mask_token
        self.most = files.depths

    def open(self) -> Reading:
        return PEagleReading(self)


class PEagleReading(Reading):
    """One sequence. What is read waits for the next guess, so that both are one pass."""

    _newest: mx.array
    _logits: mx.array
    _index: int

    def __init__(self, network: PEagle) -> None:
        super().__init__(len(network.layers))
        self._network = network
        self._waiting: tuple[mx.array, mx.array] | None = None

    @property
    def length(self) -> int:
        return super().length + (0 if self._waiting is None else self._waiting[1].shape[1])

    def read(self, hidden: mx.array, following: mx.array) -> None:
        self._see(0)
        self._waiting = hidden.astype(self._network.dtype), following

    def guess(self, count: int) -> mx.array:
        masked = self._see(count - 1)
        network, states = self._network, mx.concatenate([self._newest, masked], axis=1)
        self._logits = network.over_target(network.own_logits(states))
        self._index = 0
        return self._logits[:, :1]

    def guess_after(self, token: mx.array) -> mx.array:
        self._index += 1
        return self._logits[:, self._index : self._index + 1]

    def evaluate(self) -> None:
        self._see(0)
        super().evaluate()

    def _see(self, masked: int) -> mx.array:
        """Run what waits, and `masked` places behind it, for which the inputs of the head, (1,
        masked, width), are returned."""
        network, waiting = self._network, self._waiting
        tokens = mx.full((1, masked), network.mask_token, dtype=mx.int32)
        hidden = mx.repeat(network.mask_hidden.reshape(1, 1, -1), masked, axis=1)
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


PEAGLE = Kind("peagle", recognizes, read, PEagle, layer_ids=IDS)
