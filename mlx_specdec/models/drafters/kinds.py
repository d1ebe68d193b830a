"""Recognize, open and load hidden-state drafters from directories."""

from collections.abc import Mapping
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
from .files import DrafterFiles, Shapes, check_sizes, nested
from .network import DrafterNetwork

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


def kind_named(name: str) -> type[DrafterNetwork]:
    module, _, network = DRAFTER_KINDS[name].partition(":")
    kind: type[DrafterNetwork] = getattr(import_module(f".{module}", __package__), network)
    return kind


def kind_of(directory: Path) -> str | None:
    """Return the kind of drafter that a directory holds, or None if it holds a whole model or no
    drafter. If the package `speculators` states a kind, the tensors are not considered. Raises
    CheckpointError for a drafter of a known kind that is not supported."""
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    has_weights = shards.format_of(directory) in ("safetensors", "torch")
    names = Weights(directory).infos.keys() if has_weights else ()
    merged, stated = nested(config), config.get("speculators_model_type")
    if merged.get("projector_type") in (None, "dflash", "dspark"):
        for name in DRAFTER_KINDS:
            if stated is None and kind_named(name).recognizes(config, names):
                return name
            if name == stated and kind_named(name).by_speculators:
                return name
    if merged.get("projector_type") == "domino":
        what: str | None = "a Domino"
    elif isinstance(stated, str):
        what = f"a drafter that says it is {stated!a:.40}"
    else:
        marks = {str(config.get("model_type")), *merged, *names}
        what = next((what for mark, what in _UNSUPPORTED.items() if mark in marks), None)
        if what is None and names and all(map(mtp_layers.MTP_NAME.fullmatch, names)):
            what = "layers for multi-token prediction of another family"
    if what is None:
        return None
    raise CheckpointError(
        f"{directory} holds {what}, a drafter of a kind that is not supported: give a draft "
        f"model, or a drafter of one of the kinds {', '.join(sorted(DRAFTER_KINDS))}"
    )


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
    files, shapes = opened(name, directory, read_json(directory / "config.json"), weights)
    if shapes:
        check_weights(shapes, files.tensors.shapes, f"{directory}: ")
    return files


def opened(
    name: str, directory: Path, config: Mapping[str, Any], weights: Weights | None
) -> tuple[DrafterFiles, Shapes]:
    """Open a drafter of the kind `name`, or without weights what its configuration says. Return it
    with the shapes of its tensors if its kind is `described`. Raises CheckpointError."""
    kind = kind_named(name)
    try:
        files = kind.read(name, directory, config, weights)
        network = kind(files) if kind.described else nn.Module()
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
    sizes = (files.target_width, target.width), (files.vocabulary, target.vocabulary)
    check_sizes(files.directory, *sizes)
    network = kind_named(files.kind)(files)
    network.bind(files, target)
    # A target that cannot provide something raises OptionError. Nothing is computed.
    tokens = mx.zeros((1, 1), dtype=mx.int32)
    target.embed(tokens)
    scores = target.open_batch([[0]]).advance(tokens, hidden=network.hidden)
    files.check_encoder(scores.encoded[0].shape[-1] if scores.encoded else None)
    network.load(files, numbers)
    lighten(network)
    return network
