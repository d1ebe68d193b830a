"""A name or directory -> local files; `hub.repository` is imported only when it is needed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SourceError
from .disk.regular import check_directory
from .shards import GGUF

if TYPE_CHECKING:
    from .hub.repository import Repository

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = "weights/"
"""How names of models begin that come with the program; they mean the same from everywhere."""
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """What is local as it is, or a repository of the Hub, downloaded unless it is in the cache.

    Local is a directory, or a .gguf file, which is a model by itself. name: "t5-small" is that
    repository of the Hub unless a directory of this name is here; it is not looked for anywhere
    else. revision: a branch, tag or commit of the Hub's repository; of no meaning for what is
    local. progress: called with (done, total) bytes of what is not in the cache yet. A download
    that was interrupted goes on where it was. Raises SourceError, in one line.
    """
    local = _local(name)
    return _repository(name, revision).fetch(progress) if local is None else local


def resolve_config(name: str, *, revision: str | None = None) -> Path:
    """A local directory as it is, or one that holds the config.json of a repository of the Hub;
    nothing else is downloaded. As `resolve` otherwise."""
    local = _local(name)
    return _repository(name, revision).fetch_config() if local is None else local


def resolve_headers(
    name: str,
    place: Path,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """As `resolve`, but of the Hub's safetensors files headers alone, in the empty directory
    `place`."""
    local = _local(name)
    if local is not None:
        return local
    return _repository(name, revision).fetch_headers(place, progress)


def _repository(name: str, revision: str | None) -> Repository:
    from .hub.repository import Repository

    return Repository(name, revision)


def _local(name: str) -> Path | None:
    """A directory; None for what may be a name on the Hub. Raises SourceError for neither."""
    path = os.path.expanduser(name)
    if name.startswith(SHIPPED) and (ROOT / name).is_dir() and not os.path.lexists(path):
        path = str(ROOT / name)
    if name.strip() and os.path.isdir(path):
        check_directory(Path(path))
        return Path(path)
    if os.path.isfile(path) and path.endswith(GGUF):
        return Path(path)
    if os.path.lexists(path):
        kind = "a file" if os.path.exists(path) else "a broken link"
        raise SourceError(f"{name} is {kind}: give the directory that holds the model")
    if not _HUB_NAME.fullmatch(name) or name.split("/")[0] in ("weights", "."):
        shown = repr(name) if not name.strip() or not name.isprintable() else name
        raise SourceError(
            f"there is no directory {shown}, and it cannot be a name on the Hub: check the path"
        )
    return None
