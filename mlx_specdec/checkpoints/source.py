"""Local directories for the names of models, in Hugging Face's layout. The Hub and the formats of
other programs are imported only when they are needed."""

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from ..errors import CheckpointError, OptionError, OutputError, SourceError
from .disk import check_directory
from .shards import find, format_of
from .stored_models import OTHER_PROGRAMS, ROOT, SHIPPED, find_elsewhere

SIMILAR = 0.85
"""The least similarity to a shipped model's name at which a name is corrected, as difflib counts.
py-lama has 0.93, and t5-small, which is another model, has 0.4."""
MODEL_ENDINGS = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".npz", ".json")
"""Endings of files of models. A name that ends like this is a path, and not a name on the Hub."""
_PAGE = re.compile(
    r"https?://(www\.)?(huggingface\.co|hf\.co)/(?P<name>[^/?#]+/[^/?#]+)"
    r"(/tree/(?P<revision>[^/?#]+))?/?([?#].*)?"
)
"""The address of a model's page on the Hub."""
_SELF = re.compile(r"self(:\d+)?")


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    headers_in: Path | None = None,
    whole: bool = True,
) -> Path:
    """Return the local path of a model. A repository of the Hub is downloaded unless it is in the
    cache. An interrupted download is resumed. Raises SourceError.

    Args:
        name: A directory, a .gguf file, the name of a repository on the Hub, its page's address, or
            a name of LM Studio or ollama; see `stored_models`.
        revision: A branch, tag or commit of the Hub; None means the address's revision, or main.
        progress, headers_in, whole: See `hub.Repository.fetch`.
    """
    name, revision = _of_page(name, revision)
    if (local := _local(name)) is not None:
        return local
    from .hub import Repository

    return Repository(name, revision).fetch(progress, headers_in, whole)


def check(name: str, revision: str | None = None) -> None:
    """Raise SourceError if a model is neither local nor on the Hub nor in its cache. Nothing is
    downloaded."""
    repository, revision = on_hub(name, revision)
    if repository is not None:
        from .hub import Repository

        Repository(repository, revision).check()


def on_hub(name: str, revision: str | None = None) -> tuple[str | None, str | None]:
    """Return name and revision of a repository on the Hub; no name for a local path."""
    name, revision = _of_page(name, revision)
    return (None if _local(name) is not None else name), revision


def names_of(name: str) -> tuple[str, ...]:
    """Return the names by which a client may request a model, the shortest first.

    They are every trailing part of a local path, and the path as it was typed. A name on the Hub is
    the only name. Names of LM Studio and ollama also count without their prefix. Raises SourceError
    as `resolve` does.
    """
    name, _ = _of_page(name, None)
    local = _local(name)
    if local is None or name.startswith(OTHER_PROGRAMS):
        return tuple(dict.fromkeys((name.partition(":")[2] or name, name)))
    parts = Path(os.path.abspath(local)).parts
    ends = [str(Path(*parts[-count:])) for count in range(1, len(parts) + 1)]
    return tuple(dict.fromkeys((*ends, name)))


def nbytes_of(name: str) -> int:
    """Return the size of the files of a local model's weights, or 0 if they cannot be found. Raises
    SourceError as `resolve` does."""
    local = _local(_of_page(name, None)[0])
    if local is None or local.is_file():
        return 0 if local is None else local.stat().st_size
    try:
        return sum(file.stat().st_size for file in find(local).files)
    except (CheckpointError, OSError):
        return 0


def _of_page(name: str, revision: str | None) -> tuple[str, str | None]:
    """Return name and revision of a repository from its page's address. Other names are not
    changed."""
    if (page := _PAGE.fullmatch(name)) is None:
        return name, revision
    return page["name"], revision or page["revision"]


def _local(name: str) -> Path | None:
    """Return the local path that a name stands for, or None if it may be a name on the Hub. Raises
    SourceError if it can be neither."""
    if (found := find_elsewhere(name)) is not None:
        return found
    path = os.path.expanduser(name)
    if _SELF.fullmatch(name) and not os.path.lexists(path):
        raise SourceError(
            f"{name}: drafts made of the target's own layers were removed in release 0.4: train a "
            "draft with mlx-specdec train-draft --layers 2, or leave the draft model out"
        )
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
    if name.endswith(MODEL_ENDINGS):
        raise SourceError(f"there is no file {name:.100}: check the path")
    shipped = [place.name for place in (ROOT / SHIPPED).glob("*/")]
    similar = get_close_matches(name.removeprefix(SHIPPED), shipped, 1, SIMILAR)
    if similar and (name.startswith(SHIPPED) or "/" not in name):
        raise SourceError(f"there is no directory {name}: did you mean {SHIPPED}{similar[0]}?")
    if name.startswith(SHIPPED):
        raise SourceError(
            f"there is no directory {name:.100}: check the path; a clone of the repository has all "
            "sample models, a wheel the translator and its draft"
        )
    return None


@contextmanager
def as_directory(source: Path) -> Iterator[Path]:
    """Yield `source` if it is a directory in Hugging Face's layout, else a temporary directory with
    config.json, tokenizer files and links to the weights. Raises CheckpointError, OutputError."""
    if format_of(source) != "gguf":
        yield source
        return
    from .formats.gguf import lay_down

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
        except (CheckpointError, OptionError) as problem:
            # The user does not know the temporary directory.
            message = str(problem).replace(str(made), str(source))
            raise type(problem)(message) from problem.__cause__


def temporary_directory() -> tempfile.TemporaryDirectory[str]:
    """Return a context manager that makes a temporary directory and removes it."""
    return tempfile.TemporaryDirectory(prefix="mlx-specdec-", ignore_cleanup_errors=True)
