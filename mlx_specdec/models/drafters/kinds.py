"""Drafters that are known by their files and not run here, so that a message can name them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from ...checkpoints import destination, mtp_layers, shards
from ...checkpoints.disk import read_json, show
from ...checkpoints.files import Weights
from ...checkpoints.formats import safetensors
from ...checkpoints.t5_keys import MOST_LAYERS
from ...checkpoints.tensors import TensorInfo
from ...errors import CheckpointError
from .files import D2T, SpeculatorFiles, without_encoder
from .sizes import Settings, nested

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


def _unsupported(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """What these files hold, with its article; None where they are no drafter that is known."""
    said = nested(config)
    if said.get("projector_type") == "domino":
        return "a Domino"
    told = config.get("speculators_model_type")
    if isinstance(told, str):
        return f"a drafter that says it is {told!a:.40}"
    if what := _TYPES.get(str(config.get("model_type"))):
        return what
    if what := next((_KEYS[key] for key in _KEYS if key in said), None):
        return what
    if what := next((_TENSORS[name] for name in _TENSORS if name in names), None):
        return what
    if names and all(map(mtp_layers.looks_so, names)):
        return "layers for multi-token prediction of another family"
    return None


KINDS: Mapping[str, str] = {
    "dspark": "dflash",
    "dflash2": "dflash2",
    "dflash": "dflash",
    "peagle": "peagle",
    "eagle3": "eagle3",
    "mtp": "mtp",
    "eagle": "eagle",
    "gemma4_assistant": "gemma4_assistant",
}
"""Kind -> module. The order is the one in which they are tried: a DSpark is a DFlash with more, and
a P-EAGLE an EAGLE-3."""


OF_SPECULATORS = tuple(kind for kind in KINDS if kind not in ("eagle", "gemma4_assistant"))
"""Kinds that the package `speculators` names."""
LARGEST = 1 << 40
"""Bytes of a drafter that is believed to be one."""
MOST_TOKENS = 1 << 22
"""Of its vocabulary, where no file says them one by one."""


def kind_of(directory: Path) -> str | None:
    """The kind of drafter that a directory holds; None for a whole model, or what is no drafter.

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
    with suppress(CheckpointError):  # loading tells what is damaged
        names = _names(directory)
    kind = _recognized(read_json(file), names) if file.is_file() else None
    if kind is not None:
        raise CheckpointError(
            f"{directory} holds a drafter of the kind {kind} and no whole model: give it as the "
            "draft model, beside the target that it was made for"
        )


def _recognized(config: Mapping[str, Any], names: Collection[str]) -> str | None:
    """The kind that configuration and names of tensors tell; what `speculators` says is true."""
    if nested(config).get("projector_type") not in (None, "dflash", "dspark"):
        return None
    if (told := config.get("speculators_model_type")) is not None:
        return told if told in OF_SPECULATORS else None
    known = (
        kind
        for kind, module in KINDS.items()
        if import_module(f".{module}", __package__ or "").recognizes(kind, config, names)
    )
    return next(known, None)


def read(directory: Path) -> SpeculatorFiles | None:
    """The drafter that a directory holds, every tensor's shape checked; None as `kind_of` says.

    Raises CheckpointError for files that are damaged, contradict one another, or are not supported.
    """
    kind = kind_of(directory) if directory.is_dir() else None
    if kind is None:
        return None
    config: dict[str, Any] = read_json(directory / "config.json")
    files: SpeculatorFiles = import_module(f".{KINDS[kind]}", __package__ or "").read(
        kind, directory, config
    )
    return replace(files, without_encoder=without_encoder(directory / "config.json", config))


def outline(directory: Path) -> SpeculatorFiles | None:
    """As `read`; without weights, what config.json alone says of a drafter, whose tensors are then
    zeros. Raises CheckpointError, where it does not tell enough as well."""
    kind = kind_of(directory)
    if kind is None or shards.format_of(directory):
        return read(directory)
    config: dict[str, Any] = read_json(directory / "config.json")
    module = import_module(f".{KINDS[kind]}", __package__ or "")
    if not hasattr(module, "expected"):
        raise CheckpointError(
            f"{directory} has no weights, and the config.json of the kind {kind} alone does not "
            "tell what they are: give a directory that has them"
        )
    settings = Settings(directory / "config.json", config.get("transformer_layer_config"), config)
    settings.whole("num_hidden_layers", 1, most=MOST_LAYERS)
    infos = {
        name: TensorInfo.of("I64" if name == D2T else settings.dtype, shape)
        for name, shape in module.expected(kind, directory, config).items()
    }
    nbytes = sum(info.nbytes for info in infos.values())
    if nbytes > LARGEST or (D2T in infos and infos[D2T].extent > MOST_TOKENS):
        raise CheckpointError(
            f"{directory / 'config.json'} asks for {show(nbytes)} of weights: check it"
        )
    with destination.temporary() as made:
        shutil.copyfile(directory / "config.json", made / "config.json")
        safetensors.write_outline(made / "model.safetensors", infos)
        try:
            files = read(made)
        except CheckpointError as problem:
            raise CheckpointError(str(problem).replace(str(made), str(directory))) from problem
    assert files is not None, "its config.json told the kind"
    return replace(files, directory=directory, tensors=files.tensors.outlined())


def _names(directory: Path) -> Collection[str]:
    """Of all tensors, where they may tell a drafter."""
    if shards.format_of(directory) not in ("safetensors", "torch"):
        return ()
    return Weights(directory).infos.keys()
