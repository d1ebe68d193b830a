"""One file of a repository -> the Hub's cache: goes on where it was interrupted, and is checked."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import WeakFileLock, build_hf_headers, tqdm

from ...errors import SourceError

RESETS = 3
"""How often a broken connection is made anew."""


def fetch(name: str, commit: str, listed: RepoSibling, report: Callable[[int], None]) -> Path:
    """The path of a file of the repository `name`. listed: what the Hub's list says of it. report:
    called with numbers of bytes that were added. Raises what huggingface_hub raises, and
    SourceError for what is not as listed, which is removed.
    """
    bar, file = _bar(report), listed.rfilename
    if not isinstance(hub.try_to_load_from_cache(name, file, revision=commit), str):
        _resume(name, commit, listed, bar)
    path = Path(hub.hf_hub_download(name, file, revision=commit, tqdm_class=bar))
    if not _is_as_listed(path, listed):
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise SourceError(
            f"{file} of {name} arrived damaged, it is not what the Hub's list says, and was "
            "removed: try again"
        )
    return path


def _resume(name: str, commit: str, listed: RepoSibling, bar: type[tqdm]) -> None:
    """Bring a large file to where hf_hub_download looks for it. That itself deletes what it has
    when it is interrupted, over HTTP as by the Xet protocol; it is left to do files that HTTP is
    not allowed for, and all of them where the user has asked for Xet's speed."""
    lfs = listed.lfs
    too_large = lfs is None or lfs.size > hub.constants.MAX_HTTP_DOWNLOAD_SIZE
    if lfs is None or too_large or hub.constants.HF_XET_HIGH_PERFORMANCE:
        return
    if not re.fullmatch(r"[0-9a-f]{64}", lfs.sha256):
        raise ValueError(f"{lfs.sha256!r:.80} is no digest")
    cache = Path(hub.constants.HF_HUB_CACHE)
    folder = "models--" + name.replace("/", "--")
    blob, lock = cache / folder / "blobs" / lfs.sha256, cache / ".locks" / folder
    url = hub.hf_hub_url(name, listed.rfilename, revision=commit)
    for directory in (blob.parent, lock):
        directory.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock / f"{lfs.sha256}.lock"):
        for left in reversed(range(1 + RESETS)):
            try:
                if not blob.exists():
                    _append(url, blob, lfs.size, bar)
                return
            except Exception as problem:  # by name: which library does HTTP has changed
                if not left or type(problem).__name__ != "ReadError":
                    raise


def _append(url: str, blob: Path, size: int, bar: type[tqdm]) -> None:
    partial = blob.with_suffix(".incomplete")
    with partial.open("ab") as stream:
        if stream.tell() > size:
            stream.truncate(0)
        http_get(
            url,
            stream,
            resume_size=stream.tell(),
            headers=build_hf_headers(),
            expected_size=size,
            tqdm_class=bar,
        )
    partial.replace(blob)


def _bar(report: Callable[[int], None]) -> type[tqdm]:
    """What huggingface_hub takes for a bar: shows nothing, and reports every number of bytes."""

    class Bar(tqdm):
        def __init__(self, *given: Any, initial: int = 0, **options: Any) -> None:
            super().__init__(disable=True, initial=initial)
            report(initial)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(int(n or 0))

        def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
            super().__exit__(kind, *rest)
            if kind is not None:
                report(-self.n)  # what is kept of it is the next one's `initial`

        def update_transfer(self, n: float | None = 1) -> None:
            """By the Xet protocol: what came through the network, which is another number."""

        set_transfer_postfix_str = tqdm.set_postfix_str

    return Bar


def _is_as_listed(path: Path, listed: RepoSibling) -> bool:
    """Whether the digest, git's own of a small file, is that of the Hub's list. A mirror may list
    none."""
    with path.open("rb") as stream:
        if listed.lfs is not None:
            return hashlib.file_digest(stream, "sha256").hexdigest() == listed.lfs.sha256
        if listed.blob_id is None:
            return True
        data = stream.read()
        return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest() == listed.blob_id
