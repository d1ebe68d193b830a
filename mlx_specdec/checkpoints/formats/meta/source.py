"""Meta's directories and llama2.c's files -> what a directory of Hugging Face's has.

Knows where each keeps its tokenizer. Knows nothing of tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ... import shards
from ...disk.regular import check_regular
from .file import MetaFile, parts_of
from .llama2c import Llama2cFile, is_llama2c
from .params import PARAMS
from .text import BINARY, MODEL, read_tokenizer

BIN = ".bin"
_STOPS = [1, 2]
"""In llama2.c the token that begins a text ends the one before it."""


def is_meta(source: Path) -> bool:
    """Whether this is a directory whose only weights are Meta's."""
    return source.is_dir() and any(source.glob(shards.META)) and not _has_own(source)


def is_llama2c_source(source: Path) -> bool:
    """Whether this is a llama2.c file, or a directory whose only weights are one."""
    if not source.is_dir():
        return source.name.endswith(BIN)
    return not _has_own(source) and not is_meta(source) and bool(_binaries(source))


def lay_down_meta(source: Path, directory: Path) -> None:
    """Write config.json and tokenizer files into `directory`, and links to the parts.

    Raises CheckpointError.
    """
    parts = shards.all_own(parts_of(source / "consolidated.00.pth"))
    model = MetaFile(parts[0])
    for file in (*parts, source / PARAMS):
        (directory / file.name).symlink_to(file.absolute())
    # The first Llama came with one tokenizer beside the folders of its sizes.
    places = (source / MODEL, source.absolute().parent / MODEL)
    _finish(directory, model.config, _tokenizer(places), since_31=model.scaled)


def lay_down_llama2c(source: Path, directory: Path) -> None:
    """As `lay_down_meta`, of a file or a directory with one."""
    files = _binaries(source) if source.is_dir() else [source]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise CheckpointError(f"{source} holds several models, {names:.200}: name the file to take")
    _check_kind(files[0])
    model = Llama2cFile(files[0])
    (directory / f"model{shards.LLAMA2C}").symlink_to(files[0].absolute())
    beside, vocabulary = files[0].parent, model.config["vocab_size"]
    places = (beside / BINARY, beside / f"tok{vocabulary}.bin", beside / MODEL)
    _finish(directory, model.config, _tokenizer(places), stops=_STOPS)


def _finish(
    directory: Path,
    config: Mapping[str, Any],
    tokenizer: Path | None,
    *,
    since_31: bool = False,
    stops: list[int] | None = None,
) -> None:
    whole = dict(config)
    if tokenizer is not None:
        text = read_tokenizer(tokenizer, config["vocab_size"], since_31=since_31)
        whole.update(text.ids)
        for name, content in text.files.items():
            (directory / name).write_text(content, encoding="utf-8")
    if stops is not None:
        whole["eos_token_id"] = stops
        ids = {name: whole[name] for name in ("bos_token_id", "eos_token_id") if name in whole}
        (directory / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(whole, indent=2), encoding="utf-8")


def _check_kind(file: Path) -> None:
    """Raises CheckpointError for what many other files called .bin are."""
    check_regular(file)
    try:
        with file.open("rb") as stream:
            start = stream.read(2)
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    if start == b"PK" or start[:1] == b"\x80":
        raise CheckpointError(f"{file} is torch's own: give the directory that holds the model")


def _tokenizer(places: tuple[Path, ...]) -> Path | None:
    """The first that is there. Raises CheckpointError for a link out of its directory."""
    return next((shards.own(file) for file in places if file.is_file()), None)


def _binaries(directory: Path) -> list[Path]:
    return [file for file in sorted(directory.glob(f"*{BIN}")) if is_llama2c(file)]


def _has_own(directory: Path) -> bool:
    """Whether there are weights of a kind that is read as it is."""
    patterns = ("*.safetensors*", "pytorch_model*.bin*")
    return any(any(directory.glob(pattern)) for pattern in patterns)
