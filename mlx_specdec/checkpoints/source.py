"""A name or directory -> local files. Knows the Hugging Face Hub and what can go wrong there.

Knows nothing of what the files hold. The transfer itself, with its cache, its tokens and its
offline mode (HF_HUB_OFFLINE), is huggingface_hub's, imported only when it is needed.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..errors import SourceError

WANTED = (
    "model*.safetensors",
    "medusa_lm_head.safetensors",
    "*.json",
    "spiece.model",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.txt",
    "merges.txt",
    "*.jinja",
)
TORCH = ("pytorch_model*.bin", "pytorch_model*.json", "medusa_lm_head.pt")
"""Wanted where a repository has no safetensors."""
META = ("consolidated.*.pth",)
"""Wanted where it has none of these either; a folder of the repository named original is not."""
UNWANTED = ("*/*", "flax_model*", "pytorch_model*", "tf_model*")
FILES = (".gguf", ".bin")
"""A single file that is called so is a whole model."""
_HUB_NAME = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*(/\w[\w.-]*)?", re.ASCII)


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """What is local as it is, or a repository of the Hub, downloaded unless it is in the cache.

    Local is a directory, or a file that is a model by itself (`FILES`). name: "t5-small" is that
    repository of the Hub unless a directory of this name is here; it is not looked for anywhere
    else. revision: a branch, tag or commit of the Hub's repository; of no meaning for what is
    local. progress: called with (0, 1) and (1, 1) around a download; without it
    the download shows no bars. Raises SourceError, in one line.
    """
    return _local(name) or _download(name, revision, progress)


def resolve_config(name: str, *, revision: str | None = None) -> Path:
    """A local directory as it is, or one that holds the config.json of a repository of the Hub;
    nothing else is downloaded. As `resolve` otherwise."""
    directory = _local(name)
    if directory is not None:
        return directory
    import huggingface_hub as hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    try:
        return Path(hub.hf_hub_download(name, "config.json", revision=revision)).parent
    except Exception as problem:  # whatever its HTTP library raises has no common base
        raise SourceError(_sentence(name, revision, problem)) from problem


def _local(name: str) -> Path | None:
    """A directory; None for what may be a name on the Hub. Raises SourceError for neither."""
    path = os.path.expanduser(name)
    if name.strip() and os.path.isdir(path):
        return Path(path)
    if os.path.isfile(path) and path.endswith(FILES):
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


def _download(name: str, revision: str | None, progress: Callable[[int, int], None] | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if progress is None:
        disable_progress_bars()
    else:
        progress(0, 1)
    fetch = partial(hub.snapshot_download, name, revision=revision)
    try:
        path = Path(fetch(allow_patterns=list(WANTED), ignore_patterns=list(UNWANTED)))
        if not any(path.glob("*.safetensors")):
            fetch(allow_patterns=list(TORCH), ignore_patterns=["*/*"])
            if not any(path.glob("pytorch_model*.bin")):
                fetch(allow_patterns=list(META), ignore_patterns=["*/*"])
    except Exception as problem:  # whatever its HTTP library raises has no common base
        raise SourceError(_sentence(name, revision, problem)) from problem
    if progress is not None:
        progress(1, 1)
    return path


def _sentence(name: str, revision: str | None, problem: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(problem, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its terms on huggingface.co/{name}, then run `hf auth login`"
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision}: check --revision"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return (
            f"{name} is neither a directory here nor a repository on the Hub that you may read: "
            "check the name, or run `hf auth login` if it is private"
        )
    if isinstance(problem, errors.LocalEntryNotFoundError):
        return _unreachable(name)
    if isinstance(problem, errors.EntryNotFoundError):
        return f"{name} has no config.json: it does not hold a model that can be read here"
    if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{name} cannot be downloaded, the disk is full: make room and try again"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    reason = lines[0] if lines else type(problem).__name__
    return f"{name} cannot be downloaded: {reason}"


def _unreachable(name: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return (
            f"there is no directory {name}, it is not in the Hub's cache, and HF_HUB_OFFLINE "
            "forbids to download it"
        )
    return (
        f"there is no directory {name}, it is not in the Hub's cache, and the Hub cannot be "
        "reached: check the name and the network"
    )
