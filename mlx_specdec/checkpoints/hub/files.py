"""The names of a repository's files -> those that are worth fetching, and in which order.

Knows names alone: which formats are read here, which comes first, and what belongs beside weights.
Knows nothing of networks. The order is that of `shards.find`, so that what is fetched is what is
read. Never chosen are code, folders, and the copies of TensorFlow, Flax and ONNX.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ...errors import SourceError

BESIDE = (
    "*.json",
    "spiece.model",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
)
"""Small files: configuration and tokenizer."""
HEADS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""Medusa heads, of which the first that is there is taken."""
_INDEX = ".index."
_PLAIN = re.compile(r"[^/\\\x00-\x1f\x7f]{1,255}")
_GGUF_PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
_FOREIGN = (".h5", ".msgpack", ".onnx", ".ot", ".gguf", ".bin", ".pt", ".pth", ".safetensors")


@dataclass(frozen=True)
class Choice:
    """beside: small files, the index with them. index: of the weights; None where their names are
    known without. weights: the names that are known; of an index, none."""

    beside: tuple[str, ...]
    index: str | None
    weights: tuple[str, ...]


def choose(name: str, files: Collection[str]) -> Choice:
    """What to fetch of the repository `name`. files: its paths, as the Hub lists them.

    Raises SourceError where none of them are weights that can be read here, or where it is not
    clear which.
    """
    plain = sorted(file for file in files if _PLAIN.fullmatch(file) and not file.startswith("."))
    index, weights = _weights(plain)
    heads = [file for file in HEADS if file in plain][:1]
    if index is None and not weights and not heads:
        weights = _gguf(name, plain)
    if index is None and not weights and not heads:
        raise SourceError(_no_weights(name, files))
    beside = [file for file in plain if _matches(file, BESIDE) and _INDEX not in file]
    return Choice((*beside, *([index] if index else [])), index, (*weights, *heads))


def _weights(files: list[str]) -> tuple[str | None, list[str]]:
    """The index, or else the files, of the first format that is there."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        if f"{stem}.{suffix}.index.json" in files:
            return f"{stem}.{suffix}.index.json", []
        if f"{stem}.{suffix}" in files:
            return None, [f"{stem}.{suffix}"]
        parts = re.compile(rf"{stem}-\d{{5}}-of-\d{{5}}\.{suffix}")
        found = [file for file in files if parts.fullmatch(file)]
        if found:
            return None, found
        if suffix == "safetensors":
            found = [file for file in files if _matches(file, ("model*.safetensors",))]
            if found:
                return None, found
    return None, [file for file in files if _matches(file, ("consolidated.*.pth",))]


def _gguf(name: str, files: list[str]) -> list[str]:
    found = [file for file in files if file.endswith(".gguf")]
    wholes = {_GGUF_PART.sub("", file) for file in found}
    if len(wholes) > 1:
        raise SourceError(
            f"{name} holds {len(wholes)} models in GGUF: fetch one, as in `hf download {name} "
            f"{found[0]}`, and give the path of its file"
        )
    return found


def _no_weights(name: str, files: Collection[str]) -> str:
    sentence = f"{name} holds no weights that can be read here"
    others = sorted(file for file in files if file.endswith(_FOREIGN) and file.isprintable())
    if others:
        sentence += f", only such as {others[0]:.80}"
    return f"{sentence}: choose a repository with safetensors files"


def _matches(file: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in patterns)
