"""A repository of the Hugging Face Hub -> a directory of its cache that holds a whole model.

huggingface_hub does the transfer, with its cache, its tokens and its offline mode (HF_HUB_OFFLINE).
Checked here is what it leaves open: that the weights are all there, and that what arrived is what
the Hub's list promised. Knows nothing of what the files hold but an index of weights.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub as hub
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils.tqdm import disable_progress_bars, tqdm

from ...errors import SourceError, SpecdecError
from .. import shards
from ..disk import leftovers, sizes
from . import problems as hub_problems
from .files import choose

CONFIG = "config.json"
RESETS = 3
"""So often a file is begun again."""
_COMMIT = re.compile(r"[0-9a-f]{40}")
_DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_PIECE = 1 << 20


@dataclass(frozen=True)
class _Promise:
    """What the Hub's list says of a file. digest: SHA-256, or git's own of a small file."""

    size: int | None
    digest: str | None


class Repository:
    """A repository of the Hub at one commit, or what the cache holds of it."""

    def __init__(self, name: str, revision: str | None, *, bars: bool = False) -> None:
        """revision: a branch, tag or commit. bars: let huggingface_hub show its own."""
        if not bars:
            disable_progress_bars()
        if "HF_HUB_VERBOSITY" not in os.environ:
            # It tells of every attempt; what the user needs is the sentence at the end.
            hub.logging.set_verbosity_error()
        self._name = name
        self._revision = revision or hub.constants.DEFAULT_REVISION
        self._commit = ""
        self._listed: Mapping[str, _Promise] = {}

    def fetch(self) -> Path:
        """The directory that holds the model's files, all of them. Raises SourceError;
        CheckpointError for an index that names files elsewhere."""
        problem = self._list()
        if problem is not None:
            return self._cached(problem)
        choice = choose(self._name, self._listed)
        leftovers.sweep_downloads(
            Path(hub.constants.HF_HUB_CACHE) / f"models--{self._name.replace('/', '--')}"
        )
        self._check_room((*choice.beside, *choice.weights))
        directory = Path()
        # Weights come last: where they are, the rest is.
        for file in choice.beside:
            directory = self._file(file, bar=False).parent
        weights = choice.weights
        if choice.index is not None:
            weights = (*shards.named(directory / choice.index), *weights)
            self._check_listed(choice.index, weights)
            self._check_room(weights)
        for file in weights:
            directory = self._file(file).parent
        self._remember((*choice.beside, *weights)[0])
        return directory

    def fetch_config(self) -> Path:
        """The directory that holds config.json. Raises SourceError."""
        problem = self._list()
        if problem is not None:
            found = self._in_cache(CONFIG, self._revision)
            if found is None:
                raise hub_problems.told(self._name, self._revision, None, problem) from problem
            return found.parent
        if CONFIG not in self._listed:
            raise SourceError(
                f"{self._name} has no {CONFIG}: it does not hold a model that can be read here"
            )
        directory = self._file(CONFIG, bar=False).parent
        # Where the cache has the revision as it once was, that may be whole and this is not.
        if self._in_cache(CONFIG, self._revision) is None:
            self._remember(CONFIG)
        return directory

    def _list(self) -> Exception | None:
        """Reads the repository's files at the revision. Where the Hub cannot be asked or does not
        answer as a Hub does: why, which the cache may make good. Raises SourceError."""
        try:
            found = hub.HfApi().model_info(
                self._name,
                revision=self._revision,
                files_metadata=True,
                timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
            )
            self._commit = _matching(_COMMIT, found.sha)
            self._listed = dict(_promises(found.siblings or ()))
        except RevisionNotFoundError as problem:
            raise hub_problems.told(self._name, self._revision, None, problem) from problem
        except HFValidationError as problem:
            raise SourceError(
                f"there is no directory {self._name:.100}, and it cannot be a name on the Hub: "
                "check the path"
            ) from problem
        except (ValueError, TypeError, KeyError, AttributeError):
            return SourceError(hub_problems.strange(self._name))
        except Exception as problem:  # whatever its HTTP library raises has no common base
            return problem
        return None

    def _file(self, file: str, *, bar: bool = True) -> Path:
        """One file at the commit, fetched unless it is there. Raises SourceError."""
        before = self._in_cache(file, self._commit)
        if before is not None and self._is_known(file, before):
            return before
        try:
            path = self._download(file, _bar(file, shown=bar))
            arrived = _is_as_promised(path, self._listed[file])
        except Exception as problem:
            raise hub_problems.told(self._name, self._revision, file, problem) from problem
        if not arrived:
            _remove(path)
            raise SourceError(
                f"{file} of {self._name} arrived damaged, it is not what the Hub's list says, and "
                "was removed: try again"
            )
        return path

    def _download(self, file: str, bar: type[tqdm]) -> Path:
        for _ in range(RESETS):
            try:
                return self._fetched(file, self._commit, bar)
            except Exception as problem:
                # It resumes where a connection was closed, but not where it was reset.
                if not hub_problems.is_reset(problem):
                    raise
        return self._fetched(file, self._commit, bar)

    def _fetched(self, file: str, revision: str, bar: type[tqdm]) -> Path:
        timeout = hub.constants.HF_HUB_ETAG_TIMEOUT
        return Path(
            hub.hf_hub_download(
                self._name, file, revision=revision, etag_timeout=timeout, tqdm_class=bar
            )
        )

    def _is_known(self, file: str, path: Path) -> bool:
        """Whether a file of the cache has been checked: the revision's name is written last."""
        return bool(_COMMIT.fullmatch(self._revision)) or (
            self._in_cache(file, self._revision) == path
        )

    def _remember(self, file: str) -> None:
        """Lets the cache know the revision by its name, for use without a network."""
        if self._in_cache(file, self._revision) == self._in_cache(file, self._commit):
            return
        with suppress(Exception):  # all files are there; a later start tries again
            self._fetched(file, self._revision, _bar(file, shown=False))

    def _cached(self, problem: Exception) -> Path:
        """What the cache holds of the revision. Raises SourceError where that is no whole model."""
        reason = hub_problems.told(self._name, self._revision, None, problem)
        try:
            found = hub.snapshot_download(
                self._name, revision=self._revision, local_files_only=True, allow_patterns=[]
            )
        except Exception:
            raise reason from problem
        directory = Path(found)
        try:
            choice = choose(self._name, os.listdir(directory))
            weights = () if choice.index is None else shards.named(directory / choice.index)
            complete = all((directory / file).is_file() for file in (*weights, *choice.weights))
        except SpecdecError:
            complete = False
        if not complete:
            raise SourceError(hub_problems.partial(self._name, problem, str(reason))) from problem
        return directory

    def _in_cache(self, file: str, revision: str) -> Path | None:
        found = hub.try_to_load_from_cache(self._name, file, revision=revision)
        return Path(found) if isinstance(found, str) else None

    def _check_listed(self, index: str, files: Iterable[str]) -> None:
        for file in files:
            if file not in self._listed:
                raise SourceError(
                    f"{self._name} lacks {file:.80}, which its {index} names: choose another "
                    "--revision, or another repository"
                )

    def _check_room(self, files: Iterable[str]) -> None:
        wanted = [file for file in files if self._in_cache(file, self._commit) is None]
        nbytes = sum(self._listed[file].size or 0 for file in wanted)
        cache = Path(hub.constants.HF_HUB_CACHE)
        there = next((path for path in (cache, *cache.parents) if path.is_dir()), None)
        if there is None:
            return
        free = shutil.disk_usage(there).free
        if nbytes > free:
            raise SourceError(
                f"{self._name} needs {sizes.show(nbytes)} in the Hub's cache, and the disk of "
                f"{cache} has {sizes.show(free)} free: make room, or set HF_HOME to another place"
            )


def _bar(file: str, *, shown: bool) -> type[tqdm]:
    """A bar that says which file it is about; huggingface_hub's own has the end of an address."""

    class Bar(tqdm):
        def __init__(self, *given: Any, **options: Any) -> None:
            hidden = {} if shown else {"disable": True}
            super().__init__(*given, **{**options, "desc": file, **hidden})

    return Bar


def _promises(siblings: Iterable[RepoSibling]) -> Iterable[tuple[str, _Promise]]:
    """Raises ValueError for sizes and digests that are none. A mirror may leave them out."""
    for each in siblings:
        size = each.size if each.lfs is None else each.lfs.size
        digest = each.blob_id if each.lfs is None else each.lfs.sha256
        if not isinstance(each.rfilename, str):
            raise ValueError("not a name")
        if size is not None and (type(size) is not int or size < 0):
            raise ValueError("not a size")
        yield each.rfilename, _Promise(size, None if digest is None else _matching(_DIGEST, digest))


def _matching(pattern: re.Pattern[str], text: object) -> str:
    if not isinstance(text, str) or not pattern.fullmatch(text):
        raise ValueError("no digest")
    return text


def _is_as_promised(path: Path, promise: _Promise) -> bool:
    """Whether size and digest are those of the Hub's list."""
    size = path.stat().st_size
    if promise.size is not None and size != promise.size:
        return False
    if promise.digest is None:
        return True
    digest = hashlib.sha256()
    if len(promise.digest) == 40:
        # Of what git stores: its kind and size, a zero, the bytes.
        digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with open(path, "rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest() == promise.digest


def _remove(path: Path) -> None:
    """A file of the cache, with what it is a link to."""
    while path.is_symlink():
        target = path.parent / os.readlink(path)
        path.unlink()
        path = target
    path.unlink(missing_ok=True)
