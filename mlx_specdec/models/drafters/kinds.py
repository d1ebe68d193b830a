"""From a directory to a hidden-state drafter on its target: its kind, its files, its network."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...checkpoints import mtp_layers, shards
from ...checkpoints.disk import read_json, show
from ...checkpoints.files import Weights
from ...checkpoints.formats import safetensors
from ...checkpoints.source import temporary_directory
from ...checkpoints.t5_keys import MOST_LAYERS
from ...checkpoints.tensors import TensorInfo
from ...errors import CheckpointError
from ...interfaces import Scores
from ..base import Base
from ..number_format import NumberFormat
from . import KINDS
from .config import Settings, nested
from .files import D2T, DrafterFiles, without_encoder
from .network import DrafterNetwork, Kind

_TYPES = {
    "mlp_speculator": "an MLPSpeculator",
    "recurrent_drafter": "a ReDrafter",
}
_KEYS = {
    "medusa_num_heads": "Medusa heads, which are given as the model and bring their base model",
    "hydra_num_heads": "Hydra heads",
    "exit_dim": "a ReDrafter",
    "n_predict": "an MLPSpeculator",
}
_TENSORS = {
    "speculator.emb.0.weight": "an MLPSpeculator",
    "rnn_u.weight": "a ReDrafter",
    "drafter.rnn_u.weight": "a ReDrafter",
}
LARGEST = 1 << 40
"""Bytes that a config.json without weights may ask for."""
MOST_TOKENS = 1 << 22
"""Tokens of a drafter's vocabulary where no file lists them."""


def kind_named(name: str) -> Kind:
    """Return a kind by its name; its module is imported now."""
    module, _, constant = KINDS[name].partition(":")
    kind: Kind = getattr(import_module(f".{module}", __package__), constant)
    return kind


def kind_of(directory: Path) -> str | None:
    """Return the kind of drafter that a directory holds; None for a whole model, or no drafter.

    Raises CheckpointError for a drafter of a kind that is known and not supported.
    """
    file = directory / "config.json"
    if not file.is_file():
        return None
    config = read_json(file)
    names = _names(directory)
    if kind := _recognized(config, names):
        return kind
    if what := _unsupported(config, names):
        raise CheckpointError(
            f"{directory} holds {what}, a drafter of a kind that is not supported: give a draft "
            f"model, or a drafter of one of the kinds {', '.join(sorted(KINDS))}"
        )
    return None


def check_is_none(directory: Path) -> None:
    """Raises CheckpointError for a drafter, which is no model to generate with."""
    file = directory / "config.json"
    names: Collection[str] = ()
    with suppress(CheckpointError):  # loading reports what is damaged
        names = _names(directory)
    kind = _recognized(read_json(file), names) if file.is_file() else None
    if kind is not None:
        raise CheckpointError(
            f"{directory} holds a drafter of the kind {kind} and no whole model: give it as the "
            "draft model, beside the target that it was made for"
        )


def read(directory: Path) -> DrafterFiles | None:
    """Open the drafter that a directory holds, every tensor's shape checked; None as in `kind_of`.

    Raises CheckpointError for files that are damaged, contradict one another, or are not supported.
    """
    kind = kind_of(directory) if directory.is_dir() else None
    if kind is None:
        return None
    config: dict[str, Any] = read_json(directory / "config.json")
    files = kind_named(kind).read(directory, config)
    return replace(files, without_encoder=without_encoder(directory / "config.json", config))


def outline(directory: Path) -> DrafterFiles | None:
    """Open a drafter as `read` does; without weights, from config.json alone, with zeros in place
    of its tensors. Raises CheckpointError, where config.json does not tell enough as well."""
    name = kind_of(directory)
    if name is None or shards.format_of(directory):
        return read(directory)
    config: dict[str, Any] = read_json(directory / "config.json")
    expected = kind_named(name).expected
    if expected is None:
        raise CheckpointError(
            f"{directory} has no weights, and the config.json of the kind {name} alone does not "
            "tell what they are: give a directory that has them"
        )
    settings = Settings(directory / "config.json", config.get("transformer_layer_config"), config)
    settings.whole("num_hidden_layers", 1, most=MOST_LAYERS)
    infos = {
        name: TensorInfo.of("I64" if name == D2T else settings.dtype, shape)
        for name, shape in expected(directory, config).items()
    }
    nbytes = sum(info.nbytes for info in infos.values())
    if nbytes > LARGEST or (D2T in infos and infos[D2T].extent > MOST_TOKENS):
        raise CheckpointError(
            f"{directory / 'config.json'} asks for {show(nbytes)} of weights: check it"
        )
    with temporary_directory() as name:
        made = Path(name)
        shutil.copyfile(directory / "config.json", made / "config.json")
        safetensors.write_outline(made / "model.safetensors", infos)
        try:
            files = read(made)
        except CheckpointError as problem:
            raise CheckpointError(str(problem).replace(str(made), str(directory))) from problem
    assert files is not None, "config.json has a known kind"
    return replace(files, directory=directory, tensors=files.tensors.outlined())


def attach(files: DrafterFiles, target: Base, numbers: NumberFormat) -> DrafterNetwork:
    """Load the drafter of a directory on its target.

    numbers: what it computes in. Raises CheckpointError where it was made for another target, and
    OptionError where the target does not show or lend what it reads.
    """
    files.check(target.width, target.layers, target.vocabulary)
    network = kind_named(files.kind).network(files, target)
    scores = try_out(network, target)
    files.check_encoder(scores.encoded[0].shape[-1] if scores.encoded else None)
    network.load(files, numbers)
    return network


def try_out(network: DrafterNetwork, target: Base) -> Scores:
    """Build a pass of the target with a network's taps, without computing it: the target refuses
    what it does not show. Raises as `attach` does."""
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


def _recognized(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the kind that configuration and names of tensors tell. What the package `speculators`
    says is believed."""
    if nested(config).get("projector_type") not in (None, "dflash", "dspark"):
        return None
    if (stated := config.get("speculators_model_type")) is not None:
        known = isinstance(stated, str) and stated in KINDS
        return stated if known and kind_named(stated).by_speculators else None
    return next((name for name in KINDS if kind_named(name).recognizes(config, names)), None)


def _unsupported(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return what these files hold, with its article; None where they are no known drafter."""
    stated = nested(config)
    if stated.get("projector_type") == "domino":
        return "a Domino"
    by_speculators = config.get("speculators_model_type")
    if isinstance(by_speculators, str):
        return f"a drafter that says it is {by_speculators!a:.40}"
    if what := _TYPES.get(str(config.get("model_type"))):
        return what
    if what := next((_KEYS[key] for key in _KEYS if key in stated), None):
        return what
    if what := next((_TENSORS[name] for name in _TENSORS if name in names), None):
        return what
    if names and all(map(mtp_layers.looks_so, names)):
        return "layers for multi-token prediction of another family"
    return None


def _names(directory: Path) -> Collection[str]:
    """Return the names of all tensors, where they may tell a drafter."""
    if shards.format_of(directory) not in ("safetensors", "torch"):
        return ()
    return Weights(directory).infos.keys()
