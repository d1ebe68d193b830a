"""What a checkpoint of any format holds, from its headers: no weight is loaded or converted.

Knows directories and single files, and asks the recipes what a conversion would make of each
tensor. Where there is no recipe (no config.json, an unsupported family), it says why and shows the
tensors all the same. Two tensors may be compared to find out whether they are copies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, SourceError, SpecdecError
from . import files, keys, shards
from .account import Account
from .disk.json_file import read_json
from .disk.regular import check_directory
from .formats.reader import Contents, Reader, TensorInfo
from .formats.safetensors import LARGEST_EXTENT, SafetensorsFile
from .formats.torch.file import TorchFile
from .inspection import Inspection, Row
from .layouts import as_directory, originals
from .recipes import recipe_for

_SINGLE: Mapping[str, tuple[str, Callable[[Path], Reader]]] = {
    ".safetensors": ("safetensors", SafetensorsFile),
    **dict.fromkeys((".bin", ".pt", ".pth"), ("torch", TorchFile)),
}
"""Files that are tensors and no whole model."""
_SIZES = (
    ("d_model", "hidden_size", "n_embd"),
    ("d_ff", "intermediate_size"),
    ("num_layers", "num_hidden_layers", "n_layer"),
    ("num_decoder_layers",),
    ("num_heads", "num_attention_heads", "n_head"),
    ("num_key_value_heads",),
    ("vocab_size",),
)


def inspect(name: str) -> Inspection:
    """What the checkpoint in a directory or file holds.

    Raises SourceError where there is none, CheckpointError where the files are damaged or of no
    format that is read here.
    """
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        raise SourceError(f"there is no file or directory {name!a:.200}: check the path")
    if path.is_file() and path.suffix in _SINGLE:
        return _bare(path)
    if path.is_file() and not shards.is_gguf(path):
        raise CheckpointError(f"{path} is of no format that is read here")
    if path.is_dir():
        check_directory(path)
    with as_directory(path) as directory:
        return _inspect(path, directory)


def _bare(file: Path) -> Inspection:
    """One file of tensors without a configuration."""
    kind, reader = _SINGLE[file.suffix]
    problem = "a file of tensors alone: the model's directory says what they are"
    return _inspection(file, kind, [file], {}, reader(file).contents, "", None, problem)


def _inspect(path: Path, directory: Path) -> Inspection:
    weights = files.Weights(directory)
    config: Mapping[str, Any] = {}
    account, problem = None, ""
    try:
        config = files.read_config(directory)
        account = recipe_for(directory, None).account
    except SpecdecError as caught:
        problem = str(caught).replace(str(directory), str(path))
    tokenizer = _tokenizer(directory, made=directory != path)
    return _inspection(
        path,
        weights.format,
        originals(weights.paths, path, directory),
        config,
        weights.contents,
        tokenizer,
        account,
        problem,
    )


def _inspection(
    path: Path,
    kind: str,
    parts: Sequence[Path],
    config: Mapping[str, Any],
    contents: Contents,
    tokenizer: str,
    account: Account | None,
    problem: str,
) -> Inspection:
    rows = tuple(_rows(contents, account))
    known = account or contents
    left = {*contents.shared, *known.tied, *known.dropped}
    return Inspection(
        path=path,
        format=shards.FORMATS[kind],
        model_type=str(config.get("model_type") or ""),
        files={file.name: file.stat().st_size for file in parts},
        sizes=_sizes(config),
        tensors=rows,
        parameters=_parameters(contents.stored, config, left),
        nbytes=sum(row.nbytes for row in rows if row.name not in contents.shared),
        kept_nbytes=sum(row.nbytes for row in rows if row.name not in left),
        quantisation=_quantisation(contents.stored, config),
        tokenizer=tokenizer,
        account=account,
        problem=problem,
    )


def _rows(contents: Contents, account: Account | None) -> list[Row]:
    rows = []
    for name, info in contents.stored.items():
        becomes, note = name if account else "", ""
        if account is None:
            note = _unknown(contents, name)
        elif name in account.tied:
            becomes, note = "", f"tied to {account.tied[name]}"
        elif name in account.dropped:
            becomes, note = "", f"dropped: {account.dropped[name]}"
        elif name in account.joined:
            becomes, note = "", "joined"
        else:
            becomes = account.renamed.get(name, name)
        if name in contents.shared and not note:
            note = f"the bytes of {contents.shared[name]}"
        rows.append(Row(name, info.dtype, info.shape, info.nbytes, becomes, note))
    return rows


def _unknown(contents: Contents, name: str) -> str:
    if name in contents.tied:
        return f"tied to {contents.tied[name]}"
    return contents.dropped.get(name, "")


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """What the configuration says of the model's shape, under its own names."""
    inner = config.get("text_config")
    whole = {**config, **(inner if isinstance(inner, Mapping) else {})}
    names = [name for group in _SIZES for name in group]
    found = {name: whole.get(name) for name in names}
    return {n: size for n, size in found.items() if type(size) is int and size <= LARGEST_EXTENT}


def _group_sizes(config: Mapping[str, Any]) -> Callable[[str], int]:
    """path of a matrix -> how many of its weights share a scale, 1 where that is not known."""
    entry = config.get("quantization")
    whole = entry if isinstance(entry, Mapping) else {}

    def group(path: str) -> int:
        own = whole.get(path)
        size = (own if isinstance(own, Mapping) else whole).get("group_size")
        return size if type(size) is int and 0 < size <= LARGEST_EXTENT else 1

    return group


def _parameters(stored: Mapping[str, TensorInfo], config: Mapping[str, Any], left: set[str]) -> int:
    """Weights, each once; those of MLX's packed matrices are told from their scales."""
    group, total = _group_sizes(config), 0
    for name, info in stored.items():
        path, _, part = name.rpartition(".")
        scales = stored.get(f"{path}.scales")
        if name in left or (part in keys.PACKED and f"{path}.scales" in stored):
            continue
        if scales is not None and part == "weight" and info.dtype == "U32":
            total += math.prod(scales.shape) * group(path)
        else:
            total += math.prod(info.shape)
    return total


def _quantisation(stored: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> str:
    """How weights are packed, in words; "" where none are."""
    entry: Any = config.get("quantization")
    if isinstance(entry, Mapping):
        words = f"{entry.get('bits')!s:.40} bits in groups of {entry.get('group_size')!s:.40}"
        if entry.get("mode", "affine") != "affine":
            words += f", {entry['mode']!s:.40}"
        others = sorted({f"{e.get('bits')!s:.9}" for e in entry.values() if isinstance(e, Mapping)})
        return words + (f"; some matrices {', '.join(others)}" if others else "")
    packed = sorted({info.dtype for info in stored.values() if info.dtype.startswith(_PACKED)})
    return ", ".join(packed)


_PACKED = ("Q", "IQ", "TQ", "MXFP", "NVFP")
"""How the names of GGUF's packed types begin."""


def _tokenizer(directory: Path, made: bool) -> str:
    """Which there is; "" for none."""
    names = [file.name for file in files.tokenizer_files(directory)]
    file = directory / "tokenizer.json"
    if file.is_file():
        try:
            model = read_json(file).get("model")
        except CheckpointError:
            return "tokenizer.json, damaged"
        words = "tokenizer.json"
        if isinstance(model, Mapping):
            vocabulary = model.get("vocab")
            count = len(vocabulary) if isinstance(vocabulary, list | dict) else 0
            words += f", {model.get('type', 'of no type')}, {count} entries"
        return words + (", made from the source's own" if made else "")
    known = ("spiece.model", "tokenizer.model", "vocab.json", "vocab.txt")
    first = next((name for name in names if name in known or name.endswith(".tiktoken")), "")
    return first
