"""A GGUF model -> the files that a directory of Hugging Face's has beside its weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ... import shards
from ...tensors import naming
from .file import GgufFile
from .layout import COUNT, Metadata
from .tokenizer import build, settings

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json, generation_config.json and tokenizer files into `directory`, and links to
    the file or its parts. Where tokenizer.json lies beside the file, it is taken.

    Raises CheckpointError, also for a link out of the directory beside the file.
    """
    file = shards.find(source).files[0] if source.is_dir() else source
    if not file.is_file():
        raise CheckpointError(f"{file} is no file")
    parts = shards.all_own(shards.parts_of(file))
    model = GgufFile(file)
    for part in parts:
        (directory / part.name).symlink_to(part.absolute())
    with naming(file):
        ends = _ends(model.metadata)
        _tokenizer(file, model, directory)
    _write(directory / "config.json", {**model.config, **ends})
    _write(directory / "generation_config.json", ends)


def _tokenizer(file: Path, model: GgufFile, directory: Path) -> None:
    if (file.parent / "tokenizer.json").is_file():
        for name in _TOKENIZER:
            if (file.parent / name).is_file():
                shutil.copyfile(shards.own(file.parent / name), directory / name)
        return
    tokenizer = build(model.metadata)
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write(directory / "tokenizer_config.json", settings(model.metadata))


def _ends(metadata: Metadata) -> dict[str, Any]:
    """Ids of the tokens that begin, end and fill up a text; there may be several that end it."""
    ids = {
        name: metadata.get(key, COUNT)
        for name in ("bos", "padding", "eos", "eot")
        if (key := f"tokenizer.ggml.{name}_token_id") in metadata
    }
    ends = list(dict.fromkeys(ids[name] for name in ("eos", "eot") if name in ids))
    named = {
        "bos_token_id": ids.get("bos"),
        "pad_token_id": ids.get("padding"),
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }
    return {name: id for name, id in named.items() if id is not None}


def _write(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(dict(values), indent=2), encoding="utf-8")
