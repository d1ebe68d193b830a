"""Which of a repository's files are a model."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as hub
from huggingface_hub.errors import HFValidationError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from ...errors import CheckpointError, SourceError, SpecdecError
from .. import disk as sizes
from .. import mtp_layers, shards
from ..formats.medusa import SAFETENSORS, TORCH
from ..formats.safetensors import LONGEST_HEADER, read_header
from .problems import told
from .transfer import fetch

_PLAIN = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}")
_BESIDE = re.compile(
    r"(?!.*\.index\.).*(\.json|\.tiktoken|\.jinja)"
    r"|spiece\.model|tokenizer\.model|vocab\.txt|merges\.txt"
)
"""Small files: configuration and tokenizer."""


@dataclass(frozen=True)
class Choice:
    """beside: small files. index: of the weights; None where their names are known without one.
    weights: the names that are known; those that an index names are not among them."""

    beside: tuple[str, ...]
    index: str | None
    weights: tuple[str, ...]


def choose(name: str, files: Collection[str]) -> Choice:
    """What to fetch of the repository `name`. files: its paths, as the Hub lists them. Raises
    SourceError where there are no weights, or several models."""
    plain = sorted(file for file in files if _PLAIN.fullmatch(file))
    heads = [file for file in (SAFETENSORS, TORCH) if file in plain][:1]
    alone = [*heads, *(file for file in plain if file == mtp_layers.FILE)]
    # Of the rest mlx-lm reads none: adapters, and Mistral's own layout.
    ours = [file for file in plain if re.match(r"model|(?!.*\.safetensors$)", file)]
    chosen = shards.choose(ours)
    weights = chosen.names if chosen else ()
    if not weights and not alone:
        raise SourceError(_no_weights(name, plain))
    if chosen and chosen.format == "gguf" and len(several := shards.models(weights)) > 1:
        raise SourceError(
            f"{name} holds {len(several)} models in GGUF: fetch one, as in `hf download {name} "
            f"{weights[0]}`, and give the path of its file"
        )
    index = chosen.index if chosen else None
    beside = tuple(file for file in plain if _BESIDE.fullmatch(file))
    return Choice(beside, index, (*(() if index else weights), *alone))


def _no_weights(name: str, files: Collection[str]) -> str:
    sentence = f"{name} holds no weights that can be read here"
    if other := shards.foreign([file for file in files if file.isprintable()]):
        sentence += f", only such as {other:.80}"
    return f"{sentence}: choose a repository with safetensors files"


GUESS = 100_000
"""Bytes in which most headers fit; a second request brings the rest of a longer one."""
PIECE = 1 << 16
_MAY_BE_COPIES = re.compile(r"(^|\.)(lm_head|shared|embed_tokens)\.")


def fetch_header(name: str, commit: str, listed: RepoSibling, file: Path) -> None:
    """Write `file`. listed: what the Hub's list says of it.

    Raises SourceError where the Hub sends no parts of files, CheckpointError for a damaged header,
    and what huggingface_hub raises.
    """
    url, size = hub.hf_hub_url(name, listed.rfilename, revision=commit), listed.size or 0
    begun = _part(url, 0, min(GUESS, size))
    end = 8 + int.from_bytes(begun[:8], "little")
    if len(begun) < end <= min(size, LONGEST_HEADER):
        begun += _part(url, len(begun), end - len(begun))
    with file.open("wb") as stream:
        stream.write(begun[:end])
        stream.truncate(size)
    place = end
    for tensor, info in read_header(file).items():
        if _MAY_BE_COPIES.search(tensor):
            middle = place + info.nbytes // 2
            piece = _part(url, middle, min(PIECE, place + info.nbytes - middle))
            with file.open("r+b") as stream:
                stream.seek(middle)
                stream.write(piece)
        place += info.nbytes


def _part(url: str, begin: int, count: int) -> bytes:
    """So many bytes of what is there, and no more."""
    if count <= 0:
        return b""
    headers = {**build_hf_headers(), "Range": f"bytes={begin}-{begin + count - 1}"}
    part = bytearray()
    timeout = hub.constants.HF_HUB_DOWNLOAD_TIMEOUT
    with http_stream_backoff("GET", url, headers=headers, timeout=timeout) as answer:
        hf_raise_for_status(answer)
        if begin and answer.status_code != 206:
            raise SourceError(
                "the Hub sends no parts of files: download the model, and inspect that"
            )
        for data in answer.iter_bytes():
            part += data
            if len(part) >= count:
                break
    return bytes(part[:count])


CONFIG = "config.json"
CHUNK_BYTES = 1 << 20
"""So often progress is told, and at most so much is lost when a download is interrupted;
huggingface_hub's own 10 MB are ten seconds on a slow line."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Repository:
    """A repository of the Hub at one commit, or what the cache holds of it."""

    def __init__(self, name: str, revision: str | None) -> None:
        if "HF_HUB_VERBOSITY" not in os.environ:
            # It tells of every attempt; what the user needs is the sentence at the end.
            hub.logging.set_verbosity_error()
        hub.constants.DOWNLOAD_CHUNK_SIZE = min(hub.constants.DOWNLOAD_CHUNK_SIZE, CHUNK_BYTES)
        self._name = name
        self._revision = revision or hub.constants.DEFAULT_REVISION
        self._commit = ""
        self._listed: dict[str, RepoSibling] = {}

    def fetch(self, progress: Callable[[int, int], None] | None = None) -> Path:
        """The directory that holds the model's files, all of them. progress: in bytes, of what is
        not in the cache. Raises SourceError, CheckpointError."""
        problem = self._list()
        if problem is not None:
            return self._cached(problem)
        choice = choose(self._name, self._listed)
        weights = [*choice.weights]
        if choice.index is not None:
            weights = [choice.index, *self._named(self._file(choice.index)), *weights]
        # Weights come last: where they are, the rest is.
        return self._files([*choice.beside, *weights], progress)

    def fetch_headers(
        self, place: Path, progress: Callable[[int, int], None] | None = None
    ) -> Path:
        """`place`, filled with the small files and with what `headers` makes of the weights. Where
        the cache has the weights, or they are no safetensors files: as `fetch`."""
        problem = self._list()
        if problem is not None:
            return self._cached(problem)
        choice = choose(self._name, self._listed)
        beside, weights = [*choice.beside], [*choice.weights]
        if choice.index is not None:
            beside.append(choice.index)
            weights += self._named(self._file(choice.index))
        cached = all(self._in_cache(file, self._commit) for file in weights)
        if cached or not all(file.endswith(".safetensors") for file in weights):
            return self.fetch(progress)
        for file in beside:
            shutil.copyfile(self._file(file), place / file)
        for file in weights:
            try:
                fetch_header(self._name, self._commit, self._listed[file], place / file)
            except CheckpointError:
                raise
            except Exception as caught:
                raise told(f"{file} of {self._name}", self._revision, caught) from caught
        return place

    def fetch_config(self) -> Path:
        """The directory that holds config.json, fetched alone. Raises SourceError."""
        problem = self._list()
        if problem is not None:
            cached = self._in_cache(CONFIG, self._revision)
            if cached is None:
                raise told(self._name, self._revision, problem) from problem
            return cached.parent
        if CONFIG not in self._listed:
            raise SourceError(
                f"{self._name} has no {CONFIG}: it does not hold a model that can be read here"
            )
        directory = self._file(CONFIG).parent
        # Where the cache has the revision as it once was, that may be whole and this is not.
        if self._in_cache(CONFIG, self._revision) is None:
            self._remember(CONFIG)
        return directory

    def _list(self) -> Exception | None:
        """Reads the repository's files at the revision. Where the Hub cannot be asked or does not
        answer as a Hub does: why, which the cache may make good. Raises SourceError."""
        try:
            answer = hub.HfApi().model_info(
                self._name,
                revision=self._revision,
                files_metadata=True,
                timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
            )
            self._commit = str(answer.sha)
            self._listed = {file.rfilename: file for file in answer.siblings or ()}
            for file in self._listed.values():
                if not (isinstance(file.rfilename, str) and isinstance(file.size, int | None)):
                    raise ValueError(file)
            if not _COMMIT.fullmatch(self._commit):
                raise ValueError(self._commit)
        except RevisionNotFoundError as problem:
            raise told(self._name, self._revision, problem) from problem
        except HFValidationError as problem:
            raise SourceError(
                f"there is no directory {self._name:.100}, and it cannot be a name on the Hub: "
                "check the path"
            ) from problem
        except (ValueError, TypeError, KeyError, AttributeError):
            return SourceError(
                f"{self._name} cannot be downloaded, what answers is no Hub: check HF_ENDPOINT, "
                "the proxy and the network"
            )
        except Exception as problem:  # whatever its HTTP library raises has no common base
            return problem
        return None

    def _named(self, index: Path) -> list[str]:
        names = shards.named(index)
        for file in names:
            if file not in self._listed:
                raise SourceError(
                    f"{self._name} lacks {file:.80}, which its {index.name} names: choose another "
                    "--revision, or another repository"
                )
        return names

    def _files(self, files: list[str], progress: Callable[[int, int], None] | None) -> Path:
        missing = [file for file in files if self._in_cache(file, self._commit) is None]
        total, done = sum(self._listed[file].size or 0 for file in missing), 0
        self._check_room(total)

        def report(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None:
                progress(min(done, total), total)

        # One by one, not by snapshot_download: its threads make Ctrl-C wait for whole files.
        directory = Path()
        for file in files:
            directory = self._file(file, report).parent
        if missing and progress is not None:
            progress(total, total)
        self._remember(files[0])
        return directory

    def _file(self, file: str, report: Callable[[int], None] = lambda count: None) -> Path:
        cached = self._in_cache(file, self._commit)
        # What is in the cache has been checked where the revision's name, written last, is.
        if cached is not None and (
            self._revision == self._commit or self._in_cache(file, self._revision) == cached
        ):
            return cached
        try:
            return fetch(self._name, self._commit, self._listed[file], report)
        except Exception as problem:
            raise told(f"{file} of {self._name}", self._revision, problem) from problem

    def _remember(self, file: str) -> None:
        """Lets the cache know the revision by its name, for use without a network."""
        if self._in_cache(file, self._revision) != self._in_cache(file, self._commit):
            with suppress(Exception):  # all files are there; a later start tries again
                hub.hf_hub_download(self._name, file, revision=self._revision)

    def _cached(self, problem: Exception) -> Path:
        reason = told(self._name, self._revision, problem)
        try:
            cached = hub.snapshot_download(
                self._name, revision=self._revision, local_files_only=True, allow_patterns=[]
            )
        except Exception:
            raise reason from problem
        directory = Path(cached)
        try:
            choice = choose(self._name, os.listdir(directory))
            named = [] if choice.index is None else shards.named(directory / choice.index)
            complete = all((directory / file).is_file() for file in (*named, *choice.weights))
        except SpecdecError:
            complete = False
        if not complete:
            raise SourceError(
                f"the Hub's cache holds only a part of {self._name}, and the rest cannot be had: "
                f"{reason}"
            ) from problem
        return directory

    def _in_cache(self, file: str, revision: str) -> Path | None:
        path = hub.try_to_load_from_cache(self._name, file, revision=revision)
        return Path(path) if isinstance(path, str) else None

    def _check_room(self, nbytes: int) -> None:
        free = sizes.free(Path(hub.constants.HF_HUB_CACHE))
        if free is not None and nbytes > free:
            raise SourceError(
                f"{self._name} needs {sizes.show(nbytes)} in the Hub's cache, whose disk has "
                f"{sizes.show(free)} free: make room, or set HF_HOME to another place"
            )
