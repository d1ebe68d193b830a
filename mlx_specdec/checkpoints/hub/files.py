"""The names of a repository's files -> those that are worth fetching.

The order of formats is that of `shards.find`, so that what is fetched is what is read. Never chosen
are code, folders, and the copies of TensorFlow, Flax and ONNX.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from ...errors import SourceError

_PLAIN = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}")
_BESIDE = re.compile(
    r"(?!.*\.index\.).*(\.json|\.tiktoken|\.jinja)"
    r"|spiece\.model|tokenizer\.model|vocab\.txt|merges\.txt"
)
"""Small files: configuration and tokenizer."""
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = (
    r"model\.safetensors",
    r"model-\d{5}-of-\d{5}\.safetensors",
    r"model.*\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model-\d{5}-of-\d{5}\.bin",
    r"consolidated\..*\.pth",
)
_HEADS = (r"medusa_lm_head\.safetensors", r"medusa_lm_head\.pt")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".bin", ".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class Choice:
    """beside: small files. index: of the weights; None where their names are known without one.
    weights: the names that are known; those that an index names are not among them."""

    beside: tuple[str, ...]
    index: str | None
    weights: tuple[str, ...]


def choose(name: str, files: Collection[str]) -> Choice:
    """What to fetch of the repository `name`. files: its paths, as the Hub lists them.

    Raises SourceError where none of them are weights that can be read here, or where it is not
    clear which.
    """
    plain = sorted(file for file in files if _PLAIN.fullmatch(file))
    index, weights = _weights(plain)
    heads = _first(_HEADS, plain)[:1]
    if index is None and not weights and not heads:
        weights = _gguf(name, plain)
    if index is None and not weights and not heads:
        raise SourceError(_no_weights(name, plain))
    beside = tuple(file for file in plain if _BESIDE.fullmatch(file))
    return Choice(beside, index, (*weights, *heads))


def _weights(files: list[str]) -> tuple[str | None, list[str]]:
    """The index, or else the files, of the first format that is there."""
    for index, patterns in zip(_INDEXES, (_WEIGHTS[:3], _WEIGHTS[3:]), strict=True):
        if index in files:
            return index, []
        if weights := _first(patterns, files):
            return None, weights
    return None, []


def _first(patterns: Collection[str], files: list[str]) -> list[str]:
    """The files of the first pattern that has any."""
    for pattern in patterns:
        if named := [file for file in files if re.fullmatch(pattern, file)]:
            return named
    return []


def _gguf(name: str, files: list[str]) -> list[str]:
    parts = [file for file in files if file.endswith(".gguf")]
    wholes = {_GGUF_PART.sub("", file) for file in parts}
    if len(wholes) > 1:
        raise SourceError(
            f"{name} holds {len(wholes)} models in GGUF: fetch one, as in `hf download {name} "
            f"{parts[0]}`, and give the path of its file"
        )
    return parts


def _no_weights(name: str, files: list[str]) -> str:
    sentence = f"{name} holds no weights that can be read here"
    others = [file for file in files if file.endswith(_FOREIGN) and file.isprintable()]
    if others:
        sentence += f", only such as {others[0]:.80}"
    return f"{sentence}: choose a repository with safetensors files"
