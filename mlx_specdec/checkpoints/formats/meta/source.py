"""A directory in Meta's layout -> what a directory of Hugging Face's has."""

from __future__ import annotations

import json
from pathlib import Path

from ... import shards
from .file import MetaFile, parts_of
from .params import PARAMS
from .text import MODEL, read_tokenizer


def is_meta(source: Path) -> bool:
    """Whether this is a directory whose only weights are Meta's."""
    return source.is_dir() and shards.has_only(source, shards.META)


def lay_down_meta(source: Path, directory: Path) -> None:
    """Write config.json and tokenizer files into `directory`, and links to the parts.

    Raises CheckpointError.
    """
    parts = shards.all_own(parts_of(source / "consolidated.00.pth"))
    model = MetaFile(parts[0])
    for file in (*parts, source / PARAMS):
        (directory / file.name).symlink_to(file.absolute())
    config = dict(model.config)
    # The first Llama came with one tokenizer beside the folders of its sizes.
    places = (source / MODEL, source.absolute().parent / MODEL)
    tokenizer = next((shards.own(file) for file in places if file.is_file()), None)
    if tokenizer is not None:
        text = read_tokenizer(
            tokenizer, config["vocab_size"], since_31="rope_scaling" in model.config
        )
        config.update(text.ids)
        for name, content in text.files.items():
            (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
