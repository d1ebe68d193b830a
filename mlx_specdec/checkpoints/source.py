"""A model's name as a local directory, laid out as Hugging Face does it, while it is needed. The
Hub and other programs' formats are imported where something needs them."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError, OutputError, SourceError
from .disk import check_directory
from .shards import format_of

PACKAGE = Path(__file__).resolve().parents[1]
ROOT = PACKAGE if (PACKAGE / "weights").is_dir() else PACKAGE.parent
"""Where weights/ and prompts/ are: in an installed wheel the package, in a clone its root."""
SHIPPED = "weights/"
"""How names of models begin that come with the program."""
_PAGE = re.compile(
    r"https?://(www\.)?(huggingface\.co|hf\.co)/(?P<name>[^/?#]+/[^/?#]+)"
    r"(/tree/(?P<revision>[^/?#]+))?/?([?#].*)?"
)
"""The address of a model's page on the Hub."""


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    headers_in: Path | None = None,
) -> Path:
    """Return a local path as it is, or that of a repository of the Hub, which is downloaded unless
    it is in the cache; a download that was interrupted goes on where it was. Raises SourceError.

    name: a directory, a .gguf file, or a repository of the Hub, by its name or by the address of
    its page. revision: a branch, tag or commit of the Hub; None takes the address's, or main.
    progress, headers_in: see `hub.Repository.fetch`."""
    name, revision = _of_page(name, revision)
    if (local := _local(name)) is not None:
        return local
    from .hub import Repository

    return Repository(name, revision).fetch(progress, headers_in)


def resolve_config(name: str, *, revision: str | None = None) -> Path:
    """The same as `resolve`, but of the Hub only config.json is downloaded."""
    name, revision = _of_page(name, revision)
    if (local := _local(name)) is not None:
        return local
    from .hub import Repository

    return Repository(name, revision).fetch_config()


def names_of(name: str) -> tuple[str, ...]:
    """Return the names by which a model may be called, from the shortest. A local path is called by
    its last part, by every longer end of it, and as it was typed, wherever the program was started;
    a name on the Hub stays as it is. Raises SourceError as `resolve` does."""
    name, _ = _of_page(name, None)
    local = _local(name)
    if local is None:
        return (name,)
    parts = Path(os.path.abspath(local)).parts
    ends = [str(Path(*parts[-count:])) for count in range(1, len(parts) + 1)]
    return tuple(dict.fromkeys((*ends, name)))


def _of_page(name: str, revision: str | None) -> tuple[str, str | None]:
    """Return name and revision of a repository by the address of its page; others as they are."""
    if (page := _PAGE.fullmatch(name)) is None:
        return name, revision
    return page["name"], revision or page["revision"]


def _local(name: str) -> Path | None:
    """A directory; None for what may be a name on the Hub. Raises SourceError for neither."""
    path = os.path.expanduser(name)
    if name.startswith(SHIPPED) and (ROOT / name).is_dir() and not os.path.lexists(path):
        path = str(ROOT / name)
    if name.strip() and os.path.isdir(path):
        check_directory(Path(path))
        return Path(path)
    if os.path.isfile(path) and format_of(Path(path)):
        return Path(path)
    if os.path.lexists(path):
        kind = "a file" if os.path.exists(path) else "a broken link"
        raise SourceError(f"{name} is {kind}: give the directory that holds the model")
    if name.startswith(SHIPPED):
        raise SourceError(
            f"there is no directory {name:.100}: check the path; a clone of the repository has all "
            "sample models, a wheel the translator and its draft"
        )
    if name.strip() and "/" not in name and os.path.isdir(ROOT / SHIPPED / name):
        raise SourceError(f"there is no directory {name}: did you mean {SHIPPED}{name}?")
    return None


@contextmanager
def as_directory(source: Path) -> Iterator[Path]:
    """Give `source` itself if it is a directory as Hugging Face has them, else a temporary one:
    config.json, tokenizer files, and links to the weights. Raises CheckpointError, OutputError."""
    layout = format_of(source)
    if layout == "gguf":
        from .formats.gguf import lay_down
    elif layout == "meta":
        from .formats.meta import lay_down
    else:
        yield source
        return
    with temporary_directory() as name:
        # Messages name the directory by its last part.
        made = Path(name) / source.name
        try:
            made.mkdir(exist_ok=True)
            lay_down(source, made)
        except OSError as problem:
            raise OutputError(
                f"the temporary directory {made} cannot be written: {problem.strerror}: make room, "
                "or set TMPDIR to another place"
            ) from problem
        try:
            yield made
        except CheckpointError as problem:
            # The user knows nothing of the temporary directory.
            message = str(problem).replace(str(made), str(source))
            raise CheckpointError(message) from problem.__cause__


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """A directory for temporary files, which leaves with the block."""
    return tempfile.TemporaryDirectory(prefix="mlx-specdec-", ignore_cleanup_errors=True)
