"""Where a training's parts are kept until it is done: beside the output, in a hidden directory that
a later run with the same settings goes on from. Knows files only."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import OutputError


@contextmanager
def place(output: Path) -> Iterator[Path]:
    """The hidden directory; it is removed when the block ends well, and stays otherwise.

    Raises OutputError where `output` exists, and for anything the system refuses in the block.
    """
    if os.path.lexists(output):
        raise OutputError(f"{output} exists: delete it, or choose another --output")
    work = output.with_name(f".{output.name}.training")
    try:
        yield work
        shutil.rmtree(work, ignore_errors=True)
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise OutputError(
            f"{output} cannot be trained: {reason}: choose another --output"
        ) from None


def kept(directory: Path, settings: Mapping[str, Any]) -> bool:
    """Makes the directory; empties it unless it was made for the same settings. Whether it was."""
    note = directory / "settings.json"
    text = json.dumps(settings, sort_keys=True)
    if note.is_file() and note.read_text(encoding="utf-8") == text:
        return True
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    note.write_text(text, encoding="utf-8")
    return False
