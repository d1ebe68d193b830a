"""A trained network -> a directory that loads as a draft model, and says where it comes from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path

from ..checkpoints import files, keys
from ..checkpoints.disk import sizes
from ..checkpoints.disk.digests import Digests
from ..checkpoints.report import PROVENANCE, maker
from ..checkpoints.tensors import Tensor
from ..checkpoints.writer import Change, write_config, write_weights
from ..models.t5 import T5
from .init import Initial

STORED = mx.bfloat16


def round_as_stored(network: nn.Module) -> None:
    """Every weight becomes what will be read again; all stay float32."""

    def rounded(path: str, array: mx.array) -> mx.array:
        return array.astype(_stored(network, path, array)).astype(array.dtype)

    network.update(tree_map_with_path(rounded, network.parameters()))
    mx.eval(network.parameters())


def write(directory: Path, network: nn.Module, initial: Initial, facts: Mapping[str, Any]) -> None:
    """All files of the model; facts: what provenance.json tells besides digests. Raises OSError."""
    tensors = [
        (name, Tensor.of(array.astype(_stored(network, name, array))))
        for name, array in sorted(tree_flatten(network.parameters()))
    ]
    shard_bytes = sizes.default_shard_bytes()
    write_weights(directory, tensors, lambda name, tensor: Change(), shard_bytes=shard_bytes)
    write_config(directory, _config(network, initial.config), None)
    for file in files.tokenizer_files(initial.directory):
        shutil.copyfile(file, directory / file.name)
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
