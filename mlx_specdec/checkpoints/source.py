"""A name or directory -> local files. Knows the Hugging Face Hub and what can go wrong there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from ..errors import SourceError

WANTED = (
    "*.safetensors",
    "*.json",
    "spiece.model",
    "tokenizer.model",
    "merges.txt",
    "*.jinja",
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(
    name: str,
    *,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """A local directory as it is, or a repository of the Hub, downloaded unless it is in the cache.

    progress: called with (0, 1) and (1, 1) around a download. Raises SourceError, in one line.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise SourceError(f"{name} is a file: give the directory that holds the model")
    if not _HUB_NAME.fullmatch(name) or name.startswith("weights/"):
        raise SourceError(f"there is no directory {name}, and it is no name on the Hub")
    return _download(name, revision, progress)


def _download(name: str, revision: str | None, progress: Callable[[int, int], None] | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub import errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if progress is None:
        disable_progress_bars()
    else:
        progress(0, 1)
    try:
        path = Path(hub.snapshot_download(name, revision=revision, allow_patterns=list(WANTED)))
    except errors.GatedRepoError:
        raise SourceError(
            f"{name} is gated: accept its terms on huggingface.co and run `hf auth login`"
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{name} has no revision {revision}: check --revision") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(
            f"{name} is neither a directory here nor a repository on the Hub that you may read"
        ) from None
    except errors.LocalEntryNotFoundError:
        raise SourceError(_unreachable(name)) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as problem:
        reason = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        raise SourceError(f"{name} cannot be downloaded: {reason}") from None
    if progress is not None:
        progress(1, 1)
    return path


def _unreachable(name: str) -> str:
    if os.environ.get("HF_HUB_OFFLINE") in ("1", "ON", "YES", "TRUE"):
        return f"there is no directory {name}, and HF_HUB_OFFLINE forbids to download it"
    return (
        f"there is no directory {name}, it is not in the Hub's cache, and the Hub cannot be "
        "reached: check the name and the network"
    )
