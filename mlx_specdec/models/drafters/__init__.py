"""Networks that draft from the target's hidden states, one module a kind; see `attach`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import mlx.core as mx

from ...errors import CheckpointError
from ...interfaces import Scores
from ..base import Base
from ..number_format import NumberFormat
from .files import SpeculatorFiles
from .kinds import KINDS
from .network import Speculator


def attach(files: SpeculatorFiles, target: Base, numbers: NumberFormat) -> Speculator:
    """The drafter of a directory on its target.

    numbers: what it computes in. Raises CheckpointError where it was made for another target, and
    OptionError where the target does not show or lend what it reads.
    """
    files.check(target.width, target.layers, target.vocabulary)
    network: Speculator = module_of(files.kind).network(files, target)
    scores = try_out(network, target)
    files.check_encoder(scores.encoded[0].shape[-1] if scores.encoded else None)
    network.load(files, numbers)
    return network


def module_of(kind: str) -> Any:
    """The arithmetic of a kind, which is named as the reader of its files is."""
    return import_module(f".{KINDS[kind]}", __name__)


def try_out(network: Speculator, target: Base) -> Scores:
    """A pass of the target, of which nothing is computed: what it does not show, it refuses."""
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    scores = target.open([0]).advance(tokens, taps=network.taps)
    target.embed(tokens)
    for name in network.taps:
        width = network.width_of(name)
        if name not in scores.hidden or scores.hidden[name].shape[-1] != width:
            raise CheckpointError(
                f"what the target shows as {name} is no hidden state of width {width}: no drafter "
                "can read it"
            )
    return scores
