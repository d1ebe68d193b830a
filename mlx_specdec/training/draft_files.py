"""What a draft's training begins with, and the directory that it ends with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..assemble import Pair
from ..checkpoints import files, keys
from ..checkpoints.disk import sizes
from ..checkpoints.disk.digests import Digests
from ..checkpoints.report import PROVENANCE, maker
from ..checkpoints.source import as_directory, resolve
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import Change, write_config, write_weights
from ..errors import OptionError, VocabularyError
from ..models.base import Base
from ..models.shaped import shaped
from ..models.t5 import T5
from ..options import SELF
from .config import DraftConfig

STORED = mx.bfloat16


@dataclass(frozen=True)
class Initial:
    """model: before its first step. config: its config.json. directory: where its tokenizer files
    are. origin: in words, where it comes from."""

    model: Base
    config: Mapping[str, Any]
    directory: Path
    origin: str


@contextmanager
def initial(pair: Pair, asked: DraftConfig | None, seed: int) -> Iterator[Initial]:
    """The pair's own draft, or, where it has none, a model as asked for; its files are there during
    the block.

    Raises OptionError for a target that is heads, VocabularyError for a draft that lacks tokens of
    the target, CheckpointError as loading does.
    """
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    if pair.speculator is not None and pair.draft_name is not None:
        raise OptionError(
            f"{pair.draft_name} reads hidden states and is no draft model: name a draft model to "
            "begin with, or give layers"
        )
    if pair.draft_name == SELF:
        raise OptionError("the draft self has no weights of its own: give layers instead")
    if pair.draft is not None and (pair.translation or pair.draft.vocabulary < pair.vocabulary):
        raise VocabularyError(
            f"{pair.draft_name} knows {pair.draft.vocabulary} of the target's {pair.vocabulary} "
            "tokens, and a draft learns to predict all of them: take another, or give layers"
        )
    with as_directory(resolve(pair.draft_name or pair.name)) as directory:
        config = files.read_config(directory)
        name = short_name(pair.draft_name or pair.name)
        if pair.draft is not None:
            yield Initial(pair.draft, config, directory, name)
        elif asked is not None:
            model, changed = shaped(pair.target, config, asked.layers, asked.width, seed)
            layers = f"{asked.layers} layer{'' if asked.layers == 1 else 's'}"
            width = "" if asked.width is None else f", {asked.width} wide, random weights"
            yield Initial(model, changed, directory, f"{layers} of {name}{width}")


def short_name(model: str) -> str:
    """A directory's own name, a Hub name as it is."""
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def round_as_stored(network: nn.Module) -> None:
    """Every weight becomes what will be read again; all stay float32."""

    def rounded(path: str, array: mx.array) -> mx.array:
        return array.astype(_stored(network, path, array)).astype(array.dtype)

    network.update(tree_map_with_path(rounded, network.parameters()))
    mx.eval(network.parameters())


def write(directory: Path, network: nn.Module, initial: Initial, facts: Mapping[str, Any]) -> None:
    """All files of the model; facts: what provenance.json tells besides digests. Raises OSError."""
    tensors = {
        name: array.astype(_stored(network, name, array))
        for name, array in tree_flatten(network.parameters())
    }
    for file in files.tokenizer_files(initial.directory):
        shutil.copyfile(file, directory / file.name)
    write_trained(directory, tensors, _config(network, initial.config), facts)


def write_trained(
    directory: Path,
    tensors: Mapping[str, mx.array],
    config: Mapping[str, Any],
    facts: Mapping[str, Any],
) -> None:
    """Weights, config.json and provenance.json, as `write` says."""
    named = [(name, Tensor.of(array)) for name, array in sorted(tensors.items())]
    shard_bytes = sizes.default_shard_bytes()
    write_weights(directory, named, lambda name, tensor: Change(), shard_bytes=shard_bytes)
    write_config(directory, config, None)
    with Digests([*sorted(directory.glob("model*")), directory / "config.json"]) as digests:
        written = {name: asdict(digest) for name, digest in digests.result().items()}
    text = json.dumps({**maker(), **facts, "files": written}, indent=2, ensure_ascii=False)
    (directory / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def _stored(network: nn.Module, name: str, array: mx.array) -> mx.Dtype:
    """Half precision, but for what a model wants kept."""
    may = getattr(network, "cast_predicate", lambda _: True)
    return STORED if may(name) and mx.issubdtype(array.dtype, mx.floating) else array.dtype


def _config(network: nn.Module, config: Mapping[str, Any]) -> dict[str, Any]:
    changed = {key: value for key, value in config.items() if not key.startswith("quantization")}
    changed["dtype"] = str(STORED).rpartition(".")[2]
    changed.pop("torch_dtype", None)
    if isinstance(network, T5):
        changed["tie_word_embeddings"] = not network.config.own_head
        changed["scale_decoder_outputs"] = keys.scales_output(config)
    return changed
