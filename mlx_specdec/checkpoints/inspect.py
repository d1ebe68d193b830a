"""What a checkpoint of any format holds, from its headers: no weight is loaded or converted.

Where there is no plan of a conversion, it says why and shows the tensors all the same.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, SourceError, SpecdecError
from . import files, shards, speculators
from .disk.reading import check_directory, read_json
from .formats import medusa
from .inspection import Inspection, inspection_of
from .plans import plan_for
from .source import as_directory, originals, resolve_headers
from .speculators.layout import SpeculatorFiles

_SINGLE = {".safetensors": "safetensors", **dict.fromkeys((".bin", ".pt", ".pth"), "torch")}
"""Files that are tensors and no whole model: how they end, and their formats."""


def inspect(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Inspection:
    """What the checkpoint in a directory, a file or a repository of the Hub holds.

    Of the Hub's safetensors files headers alone are fetched; other formats are downloaded, which
    revision and progress are about. Raises SourceError where there is none, CheckpointError where
    the files are damaged or of no format that is read here.
    """
    path = Path(os.path.expanduser(name))
    if os.path.lexists(path):
        return _inspect(path)
    if path.suffix in (*_SINGLE, ".gguf"):
        raise SourceError(f"there is no file {name!a:.200}: check the path")
    with tempfile.TemporaryDirectory(prefix="mlx-specdec-") as place:
        try:
            told = _inspect(
                resolve_headers(name, Path(place), revision=revision, progress=progress)
            )
        except CheckpointError as caught:
            # The user knows nothing of the temporary directory.
            raise CheckpointError(str(caught).replace(place, name)) from caught
    return replace(told, path=Path(name), problem=told.problem.replace(place, name))


def _inspect(path: Path) -> Inspection:
    """Of what is on this disk."""
    if not os.path.exists(path):
        raise SourceError(f"{path!s} is a broken link: check the path")
    if path.is_file() and path.suffix in _SINGLE:
        problem = "a file of tensors alone: the model's directory says what they are"
        return _inspect_file(path, path, {}, problem)
    if path.is_file() and not shards.format_of(path):
        raise CheckpointError(f"{path} is of no format that is read here")
    if path.is_dir():
        check_directory(path)
        if medusa.is_medusa(path):
            return _inspect_heads(path)
        # Of one that is not supported what is there is shown all the same.
        with suppress(CheckpointError):
            if drafter := speculators.read(path):
                return _inspect_drafter(path, drafter)
    with as_directory(path) as directory:
        return _inspect_model(path, directory)


def _inspect_file(path: Path, file: Path, config: Mapping[str, Any], problem: str) -> Inspection:
    kind = _SINGLE[file.suffix]
    contents = files.READERS[kind](file).contents
    return inspection_of(path, kind, [file], config, contents, problem=problem)


def _inspect_heads(path: Path) -> Inspection:
    config = read_json(path / "config.json")
    base = f"{config.get(medusa.BASE)!a:.200}"
    problem = f"Medusa heads of the base model {base} are used as they are"
    config = {**config, "model_type": "Medusa heads"}
    return _inspect_file(path, medusa.file_of(path), config, problem)


def _inspect_drafter(path: Path, drafter: SpeculatorFiles) -> Inspection:
    weights, config = files.Weights(path), read_json(path / "config.json")
    inner = config.get("transformer_layer_config")
    config = {**config, **(inner if isinstance(inner, Mapping) else {}), "model_type": drafter.kind}
    told = inspection_of(
        path,
        weights.format,
        list(weights.paths),
        config,
        weights.contents,
        plan=plan_for(path),
        problem="",
    )
    return replace(told, drafter=drafter.facts())


def _inspect_model(path: Path, directory: Path) -> Inspection:
    weights = files.Weights(directory)
    config: Mapping[str, Any] = {}
    plan, problem = None, ""
    try:
        config = files.read_config(directory)
        plan = plan_for(directory)
    except SpecdecError as caught:
        problem = str(caught).replace(str(directory), str(path))
    return inspection_of(
        path,
        weights.format,
        originals(weights.paths, path, directory),
        config,
        weights.contents,
        tokenizer=_tokenizer(directory, made=directory != path),
        plan=plan,
        problem=problem,
    )


def _tokenizer(directory: Path, made: bool) -> str:
    file = directory / "tokenizer.json"
    names = [each.name for each in files.tokenizer_files(directory)]
    if not file.is_file():
        known = ("spiece.model", "tokenizer.model", "vocab.json", "vocab.txt", ".tiktoken")
        return next((name for name in names if name.endswith(known)), "")
    try:
        model = read_json(file).get("model")
    except CheckpointError:
        return "tokenizer.json, damaged"
    words = "tokenizer.json"
    if isinstance(model, Mapping):
        entries = model.get("vocab")
        count = len(entries) if isinstance(entries, list | dict) else 0
        words += f", {model.get('type', 'of no type')}, {count} entries"
    return words + (", made from the source's own" if made else "")
