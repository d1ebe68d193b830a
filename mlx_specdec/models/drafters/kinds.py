"""Recognize, open and load hidden-state drafters from directories."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ...checkpoints import shards
from ...checkpoints.disk import read_json
from ...checkpoints.files import Weights
from ...checkpoints.tensors import check_weights
from ...errors import CheckpointError, first_line
from ..base import Base
from ..cpu_layers import lighten
from ..number_format import NumberFormat
from . import DRAFTER_KINDS, mtp_layers
from .files import DrafterFiles, Shapes, nested
from .network import DrafterKind, DrafterNetwork

_UNSUPPORTED = {
    "mlp_speculator": "an MLPSpeculator",
    "n_predict": "an MLPSpeculator",
    "speculator.emb.0.weight": "an MLPSpeculator",
    "recurrent_drafter": "a ReDrafter",
    "exit_dim": "a ReDrafter",
    "rnn_u.weight": "a ReDrafter",
    "drafter.rnn_u.weight": "a ReDrafter",
    "medusa_num_heads": "Medusa heads, which are given as the model and bring their base model",
    "hydra_num_heads": "Hydra heads",
}
"""Unsupported drafters: a model type, an entry of config.json or a tensor's name, and the drafter
that it belongs to."""


def kind_named(name: str) -> DrafterKind:
    module, _, constant = DRAFTER_KINDS[name].partition(":")
    kind: DrafterKind = getattr(import_module(f".{module}", __package__), constant)
    return kind


def kind_of(directory: Path) -> str | None:
    """Return the kind of drafter that a directory holds, or None if it holds a whole model or no
    drafter. Raises CheckpointError for a drafter of a known kind that is not supported."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    has_weights = shards.format_of(directory) in ("safetensors", "torch")
    names = Weights(directory).infos.keys() if has_weights else ()
    if kind := _recognized(config, names):
        return kind
    if what := _unsupported(config, names):
        raise CheckpointError(
            f"{directory} holds {what}, a drafter of a kind that is not supported: give a draft "
            f"model, or a drafter of one of the kinds {', '.join(sorted(DRAFTER_KINDS))}"
        )
    return None


def check_is_none(directory: Path) -> None:
    """Raise CheckpointError if a directory holds a drafter, which cannot generate alone."""
    kind = None
    with suppress(CheckpointError):  # loading reports what is damaged
        kind = kind_of(directory)
    if kind is not None:
        raise CheckpointError(
            f"{directory} holds a drafter of the kind {kind} and no whole model: give it as the "
            "draft model, together with the target that it was made for"
        )


def read(directory: Path) -> DrafterFiles | None:
    """Open the drafter that a directory holds, and check every tensor's shape. Return None if there
    is no drafter, as `kind_of` does. Raises CheckpointError for files that are damaged,
    unsupported, or contradict one another."""
    name = kind_of(directory) if directory.is_dir() else None
    if name is None:
        return None
    weights = Weights(directory)
    files, shapes = _built(name, directory, read_json(directory / "config.json"), weights)
    if shapes:
        try:
            check_weights(shapes, files.tensors.shapes)
        except CheckpointError as problem:
            raise CheckpointError(f"{directory}: {problem}") from None
    return files


def shapes_of(kind: str, directory: Path, config: Mapping[str, Any]) -> Shapes:
    """Return the shapes of the tensors of the drafter that a configuration describes. Messages
    mention `directory`. Raises CheckpointError."""
    return _built(kind, directory, config, None)[1]


def _built(
    name: str, directory: Path, config: Mapping[str, Any], weights: Weights | None
) -> tuple[DrafterFiles, Shapes]:
    """Open a drafter. Return it with the shapes of its tensors if its kind is `described`."""
    kind = kind_named(name)
    try:
        files = kind.read(name, directory, config, weights)
        network = kind.network(files) if kind.described else nn.Module()
    except CheckpointError:
        raise
    except Exception as problem:  # an invalid value may raise anything
        raise CheckpointError(
            f"{directory / 'config.json'} does not describe a drafter of the kind {name} that "
            f"can be built ({type(problem).__name__}: {first_line(problem):.200})"
        ) from problem
    return files, {path: array.shape for path, array in tree_flatten(network.parameters())}


def attach(files: DrafterFiles, target: Base, numbers: NumberFormat) -> DrafterNetwork:
    """Load a drafter and bind it to its target. Raises CheckpointError if the drafter was made for
    another target, and OptionError if the target lacks the hidden states, the embedding or the head
    that the drafter needs."""
    files.check(target.width, target.layers, target.vocabulary)
    network = kind_named(files.kind).network(files)
    network.bind(files, target)
    # A target that cannot provide something raises OptionError. Nothing is computed.
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    target.embed(tokens)
    scores = target.open([0]).advance(tokens, hidden=network.hidden)
    files.check_encoder(scores.encoded[0].shape[-1] if scores.encoded else None)
    network.load(files, numbers)
    lighten(network)
    return network


def _recognized(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the kind of a drafter, from its configuration and the names of its tensors. If the
    package `speculators` states a kind, the tensors are not considered."""
    if nested(config).get("projector_type") not in (None, "dflash", "dspark"):
        return None
    if (stated := config.get("speculators_model_type")) is not None:
        if not isinstance(stated, str) or stated not in DRAFTER_KINDS:
            return None
        return stated if kind_named(stated).by_speculators else None
    return next(
        (name for name in DRAFTER_KINDS if kind_named(name).recognizes(config, names)), None
    )


def _unsupported(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    stated = nested(config)
    if stated.get("projector_type") == "domino":
        return "a Domino"
    by_speculators = config.get("speculators_model_type")
    if isinstance(by_speculators, str):
        return f"a drafter that says it is {by_speculators!a:.40}"
    marks = {str(config.get("model_type")), *stated, *names}
    is_mtp = names and all(map(mtp_layers.MTP_NAME.fullmatch, names))
    foreign_mtp = "layers for multi-token prediction of another family" if is_mtp else None
    return next((what for mark, what in _UNSUPPORTED.items() if mark in marks), foreign_mtp)
