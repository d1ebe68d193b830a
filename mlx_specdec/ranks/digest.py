"""What ranks compare before they work together: versions, arguments, a model's files."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from .. import __version__

SAMPLE = 1 << 16
"""Bytes that are read of a large file, at its beginning, in its middle and at its end."""
WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
TOLD = ("config.json", "tokenizer*", "spiece.model", "generation_config.json")


def versions() -> str:
    """Of all that computes."""
    return f"mlx-specdec {__version__}, mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"


def arguments() -> str:
    """What stands for the command line of this process."""
    return hashlib.blake2b("\0".join(sys.argv[1:]).encode(), digest_size=8).hexdigest()


def model(directory: Path) -> str:
    """What stands for the files of a model: all of the small ones, samples of the weights."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted({f for pattern in (*TOLD, *WEIGHTS) for f in directory.glob(pattern)}):
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        for part in _samples(file):
            digest.update(part)
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        for place in sorted({0, max(0, size // 2), max(0, size - SAMPLE)}):
            stream.seek(place)
            yield stream.read(SAMPLE)
