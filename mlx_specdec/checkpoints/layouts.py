"""Other programs' layouts -> a directory as Hugging Face would have it, while it is needed.

What is materialized is small: config.json, tokenizer files made from the source's own, and links to
the weights, which stay where they are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, OutputError
from .disk import leftovers
from .formats.gguf import source as gguf_source
from .formats.meta.source import is_meta, lay_down_meta
from .shards import is_gguf

_LAYOUTS: tuple[tuple[Callable[[Path], bool], Callable[[Path, Path], None]], ...] = (
    (is_gguf, gguf_source.lay_down),
    (is_meta, lay_down_meta),
)
"""How each is recognized, and materialized."""


@contextmanager
def as_directory(source: Path) -> Iterator[Path]:
    """`source` itself where it is a directory as Hugging Face's or mlx-lm's are; else a temporary
    one, which says the same in their words and is removed at the end.

    Raises CheckpointError where a source of another layout is damaged or not supported, OutputError
    where the temporary directory cannot be written.
    """
    materialize = next((write for recognizes, write in _LAYOUTS if recognizes(source)), None)
    if materialize is None:
        yield source
        return
    with contextlib.ExitStack() as left:
        with _written(tempfile.gettempdir()):
            made = left.enter_context(leftovers.temporary())
        try:
            with _written(str(made)):
                materialize(source, made)
            yield made
        except CheckpointError as problem:
            # The user knows nothing of the temporary directory.
            said = str(problem).replace(str(made), str(source))
            raise CheckpointError(said) from problem.__cause__


def originals(paths: Iterable[Path], source: Path, directory: Path) -> list[Path]:
    """The source's own files, of which `directory`, where it was materialized, has links."""
    if directory == source:
        return list(paths)
    return [Path(os.readlink(path)) if path.is_symlink() else path for path in paths]


@contextmanager
def _written(directory: str) -> Iterator[None]:
    """Says in a sentence what the system refuses in the block."""
    try:
        yield
    except OSError as problem:
        reason = problem.strerror or type(problem).__name__
        raise OutputError(
            f"the temporary directory {directory} cannot be written: {reason}: make room, or set "
            "TMPDIR to another place"
        ) from problem
