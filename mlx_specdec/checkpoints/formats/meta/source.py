"""A directory in Meta's layout -> what a directory of Hugging Face's has."""

from __future__ import annotations

import json
from pathlib import Path

from ... import shards
from .file import MetaFile, parts_of
from .params import PARAMS
from .text import MODEL, read_tokenizer


def lay_down(source: Path, directory: Path) -> None:
    """Write config.json and tokenizer files into `directory`, and links to the parts.

    Raises CheckpointError.
    """
    parts = shards.all_own(parts_of(source / "consolidated.00.pth"))
    config = dict(MetaFile(parts[0]).config)
    for file in (*parts, source / PARAMS):
        (directory / file.name).symlink_to(file.absolute())
    # The first Llama came with one tokenizer beside the folders of its sizes.
    places = (source / MODEL, source.absolute().parent / MODEL)
    tokenizer = next((shards.own(file) for file in places if file.is_file()), None)
    if tokenizer is not None:
        text = read_tokenizer(tokenizer, config["vocab_size"], since_31="rope_scaling" in config)
        config.update(text.ids)
        for name, content in text.files.items():
            (directory / name).write_text(content, encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
