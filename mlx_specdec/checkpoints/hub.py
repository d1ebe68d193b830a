"""Download of a model's files from the Hugging Face Hub into huggingface_hub's cache. Without a
network the cache is used alone. Every error becomes one sentence."""

import hashlib
import io
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import huggingface_hub as hub
from huggingface_hub import errors, utils
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoSibling

from .. import system
from ..errors import SourceError, SpecdecError, first_line
from . import shards
from .files import CARRIED
from .formats.safetensors import read_header
from .tensors import MAY_BE_COPIES

CONFIG = "config.json"
GUESS = 100_000
"""Bytes of a file that are requested for its header. A longer header needs a second request."""
LONGEST_HEADER = 100_000_000
"""Most bytes of a header, which is also the limit of the library safetensors."""
PROBE = 1 << 16
"""Bytes from the middle of a tensor that are fetched to find out whether it is a copy."""
_PLAIN_NAME = re.compile(r"[^./\\\x00-\x1f\x7f][^/\\\x00-\x1f\x7f]{0,254}")


def choose(name: str, files: Collection[str]) -> tuple[list[str], str | None, list[str]]:
    """Choose the files to download from the repository `name`, whose paths are `files`.

    Raises SourceError if there are no weights, or several models.

    Returns:
        The small files, the index of the weights or None, and weights that are not in the index.
    """
    plain = sorted(file for file in files if _PLAIN_NAME.fullmatch(file))
    heads = [file for file in (shards.HEADS, shards.TORCH_HEADS) if file in plain][:1]
    alone = [*heads, *(file for file in plain if file == shards.MTP_LAYERS)]
    # mlx-lm does not read other safetensors files, such as adapters and Mistral's layout.
    kind, weights = shards.choose([f for f in plain if re.match(r"model|(?!.*\.safetensors$)", f)])
    if not weights and not alone:
        raise SourceError(f"{name} holds no weights that are read here: choose safetensors files")
    if kind == "gguf" and len(several := shards.models(weights)) > 1:
        raise SourceError(
            f"{name} holds {len(several)} models in GGUF: fetch one, as in `hf download {name} "
            f"{weights[0]}`, and give the path of its file"
        )
    index = next((file for file in weights if file in shards.INDEXES), None)
    small = [file for file in plain if any(fnmatchcase(file, one) for one in (CONFIG, *CARRIED))]
    return small, index, [*(() if index else weights), *alone]


class Repository:
    """A repository of the Hub at one commit, or its files in the cache. files: Path -> the facts of
    the file, as soon as a method has listed them."""

    def __init__(self, name: str, revision: str | None) -> None:
        if "HF_HUB_VERBOSITY" not in os.environ:
            # huggingface_hub logs every attempt. The final error message is enough for the user.
            hub.logging.set_verbosity_error()
        self._name = name
        self._revision = revision or hub.constants.DEFAULT_REVISION
        self._commit = ""
        self.files: dict[str, RepoSibling] = {}

    def fetch(
        self,
        progress: Callable[[int, int], None] | None = None,
        headers_in: Path | None = None,
        whole: bool = True,
    ) -> Path:
        """Download the model's files and return their directory. Raises SpecdecError.

        Args:
            progress: Called with (done, total) bytes of the files that are not in the cache.
            headers_in: If set, an empty directory for the small files and the headers of
                safetensors files. It is not used if the cache has the weights, or if they have
                another format.
            whole: Whether weights may be downloaded whole.
        """
        if (problem := self._list()) is not None:
            return self._cached(problem)
        small, weights = self._chosen(self.files, self._file)
        cached = all(self._in_cache(file, self._commit) for file in weights)
        if headers_in is None or cached or not all(f.endswith(".safetensors") for f in weights):
            if not (whole or cached):
                raise SourceError(
                    f"{self._name} has no safetensors files, whose headers alone could be read: "
                    f"run `hf download {self._name}` first"
                )
            return self._download([*small, *weights], progress)  # with weights, all files are there
        for file in small:
            shutil.copyfile(self._file(file), headers_in / file)
        for file in weights:
            self._outline(file, headers_in / file)
        return headers_in

    def check(self) -> None:
        """Raise SpecdecError if neither the Hub nor its cache has the repository."""
        if (problem := self._list()) is not None:
            self._cached(problem)

    def small(self, file: str) -> Path | None:
        """Download one small file and return its path, or None if there is no such file. Without a
        network the cache is used. Raises SpecdecError."""
        if not self.files and (problem := self._list()) is not None:
            if (cached := self._in_cache(file, self._revision)) is None:
                raise self._error(problem) from problem
            return cached
        if file not in self.files:
            return None
        path = self._file(file)
        # The cache may hold an older commit of this revision with all files.
        if self._in_cache(file, self._revision) is None:
            self._remember(file)
        return path

    def header(self, file: str, guess: int = 8) -> bytes:
        """Return the beginning of a safetensors file up to its tensors. guess: The bytes of the
        first request. A longer header needs a second one. Raises SpecdecError."""
        size, stream = self._entry(file).size or 0, io.BytesIO()
        self.part(file, 0, min(guess, size), stream)
        end = 8 + int.from_bytes(stream.getvalue()[:8], "little")
        if stream.tell() < end <= min(size, LONGEST_HEADER):
            self.part(file, stream.tell(), end - stream.tell(), stream)
        return stream.getvalue()[:end]

    def part(
        self,
        file: str,
        begin: int,
        count: int,
        stream: BinaryIO,
        report: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Write `count` bytes of a file from position `begin` on to a stream. If the connection
        breaks, the rest is requested. Raises SpecdecError. report: Is called with the bytes of each
        piece."""
        arrived = 0

        def check(nbytes: int) -> None:
            nonlocal arrived
            arrived += nbytes
            if arrived > count:
                raise SourceError("the Hub sends no parts of files: download the model")
            report(nbytes)

        url = hub.hf_hub_url(self._name, self._entry(file).rfilename, revision=self._commit)
        headers = {**utils.build_hf_headers(), "Range": f"bytes={begin}-{begin + count - 1}"}
        try:
            if count:
                http_get(url, stream, headers=headers, expected_size=count, tqdm_class=_bar(check))
        except Exception as problem:
            raise self._error(problem, file) from problem

    def _entry(self, file: str) -> RepoSibling:
        if file not in self.files:
            raise SourceError(f"{self._name} lacks {file:.80}, which its index names")
        return self.files[file]

    def _list(self) -> Exception | None:
        """List the repository's files. Return the error if the Hub cannot be reached, because the
        cache may have the files. Raises SourceError for other errors."""
        try:
            answer = hub.HfApi().model_info(
                self._name,
                revision=self._revision,
                files_metadata=True,
                timeout=hub.constants.HF_HUB_ETAG_TIMEOUT,
            )
            self._commit = str(answer.sha)
            self.files = {file.rfilename: file for file in answer.siblings or ()}
        except errors.RevisionNotFoundError as problem:
            raise self._error(problem) from problem
        except errors.HFValidationError as problem:
            name = self._name if self._name.isprintable() else ascii(self._name)
            neither = "and it cannot be a name on the Hub: check the path"
            raise SourceError(f"there is no directory {name:.100}, {neither}") from problem
        except (ValueError, TypeError, KeyError, AttributeError):
            no_hub = "and what answers is no Hub: check HF_ENDPOINT, the proxy and the network"
            return SourceError(f"there is no directory {self._name} here, {no_hub}")
        except Exception as problem:  # exceptions of the HTTP library have no common base
            return problem
        return None

    def _chosen(
        self, files: Collection[str], locate: Callable[[str], Path]
    ) -> tuple[list[str], list[str]]:
        """Choose small files and weights, with the files in the index. locate: Returns the local
        path of a file."""
        small, index, weights = choose(self._name, files)
        if index is None:
            return small, weights
        named = sorted({*shards.places_of(locate(index)).values()})
        for file in named:
            if file not in files:
                raise SourceError(f"{self._name} lacks {file:.80}, which its {index} names")
        return [*small, index], [*named, *weights]

    def _download(self, files: list[str], progress: Callable[[int, int], None] | None) -> Path:
        missing = [file for file in files if self._in_cache(file, self._commit) is None]
        total, done = sum(self.files[file].size or 0 for file in missing), 0
        cache, instead = Path(hub.constants.HF_HUB_CACHE), ", or set HF_HOME to another place"
        what = f"{self._name} in the Hub's cache"
        system.check_room(cache, total, what, SourceError, instead)

        def report(count: int) -> None:
            nonlocal done
            done += count
            if progress is not None and missing:
                progress(min(done, total), total)

        # The threads of snapshot_download would make Ctrl-C wait until files are complete.
        paths = [self._file(file, report) for file in files]
        report(total - done)
        self._remember(files[0])
        return paths[-1].parent

    def _file(self, file: str, report: Callable[[int], None] = lambda count: None) -> Path:
        if (cached := self._in_cache(file, self._commit)) is not None:
            return cached
        try:
            bar = _bar(report)
            self._resume(self.files[file], bar)
            return Path(
                hub.hf_hub_download(self._name, file, revision=self._commit, tqdm_class=bar)
            )
        except Exception as problem:
            raise self._error(problem, file) from problem

    def _resume(self, listed: RepoSibling, bar: type[utils.tqdm]) -> None:
        """Download a large file to where hf_hub_download expects it, and check its digest.

        hf_hub_download itself cannot resume: it deletes a partial file when it is interrupted. It
        still downloads files too large for HTTP, and all files if the user has chosen Xet's speed.
        """
        lfs, most = listed.lfs, hub.constants.MAX_HTTP_DOWNLOAD_SIZE
        if lfs is None or lfs.size > most or hub.constants.HF_XET_HIGH_PERFORMANCE:
            return
        cache = Path(hub.constants.HF_HUB_CACHE)
        folder = "models--" + self._name.replace("/", "--")
        blob, locks = cache / folder / "blobs" / lfs.sha256, cache / ".locks" / folder
        blob.parent.mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        partial = blob.with_suffix(".incomplete")
        with utils.WeakFileLock(locks / f"{lfs.sha256}.lock"):
            if blob.exists():
                return
            with partial.open("ab+") as stream:
                if stream.tell() > lfs.size:
                    stream.truncate(0)
                http_get(
                    hub.hf_hub_url(self._name, listed.rfilename, revision=self._commit),
                    stream,
                    resume_size=stream.tell(),
                    headers=utils.build_hf_headers(),
                    expected_size=lfs.size,
                    tqdm_class=bar,
                )
                stream.seek(0)
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
            if digest != lfs.sha256:
                partial.unlink()
                raise SourceError(
                    f"{listed.rfilename} of {self._name} arrived damaged, it is not what the Hub's "
                    "list says, and was removed: try again"
                )
            partial.replace(blob)

    def _outline(self, file: str, target: Path) -> None:
        """Write a safetensors file with the Hub's size and header, and the middle of each tensor
        that may be a copy of another. The rest of the file is a sparse hole."""
        header = self.header(file, GUESS)
        with target.open("wb") as stream:
            stream.write(header)
            stream.truncate(self._entry(file).size or 0)
        place = len(header)
        for tensor, info in read_header(target).items():
            if MAY_BE_COPIES.search(tensor):
                middle = place + info.nbytes // 2
                with target.open("r+b") as stream:
                    stream.seek(middle)
                    self.part(file, middle, min(PROBE, place + info.nbytes - middle), stream)
            place += info.nbytes

    def _remember(self, file: str) -> None:
        """Store the name of the revision in the cache, for use without a network."""
        if self._in_cache(file, self._revision) != self._in_cache(file, self._commit):
            with suppress(Exception):  # the files are complete, and a later run tries again
                hub.hf_hub_download(self._name, file, revision=self._revision)

    def _cached(self, problem: Exception) -> Path:
        """Return the model's directory in the cache. Raises SourceError unless it is complete."""
        reason = self._error(problem)
        try:
            cached = hub.snapshot_download(
                self._name, revision=self._revision, local_files_only=True, allow_patterns=[]
            )
        except Exception:
            raise reason from problem
        try:
            self._chosen(os.listdir(cached), Path(cached).joinpath)
        except SpecdecError:
            raise SourceError(
                f"the Hub's cache holds only a part of {self._name}, and the rest cannot be had: "
                f"{reason}"
            ) from problem
        return Path(cached)

    def _in_cache(self, file: str, revision: str) -> Path | None:
        path = hub.try_to_load_from_cache(self._name, file, revision=revision)
        return Path(path) if isinstance(path, str) else None

    def _error(self, problem: Exception, file: str = "") -> SpecdecError:
        """Turn an exception of huggingface_hub into one sentence. file: The requested file."""
        if isinstance(problem, SpecdecError):
            return problem
        cause = problem.__cause__
        if isinstance(problem, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
            return self._error(cause, file)
        name, status = self._name, getattr(getattr(problem, "response", None), "status_code", 0)
        failed = f"{f'{file} of ' if file else ''}{name} cannot be downloaded"
        # Names are compared, because huggingface_hub has changed its HTTP library.
        kinds = {kind.__name__ for kind in type(problem).__mro__}
        if isinstance(problem, errors.GatedRepoError):
            terms = f"accept its terms on huggingface.co/{name}"
            sentence = f"{name} is gated: {terms}, then run `hf auth login`"
        elif isinstance(problem, errors.RevisionNotFoundError):
            sentence = f"{name} has no revision {self._revision}: check --revision"
        elif isinstance(problem, errors.RepositoryNotFoundError) or status == 401:
            sentence = (
                f"{name} is neither a directory here nor a repository on the Hub that you may "
                "read: check the name, or run `hf auth login` if it is private"
            )
        elif isinstance(problem, errors.OfflineModeIsEnabled):
            command = ["hf", "download", name]
            if self._revision != hub.constants.DEFAULT_REVISION:
                command += ["--revision", self._revision]
            sentence = (
                f"there is no directory {name}, it is not in the Hub's cache, and HF_HUB_OFFLINE "
                f"forbids to download it: check the name, or run `HF_HUB_OFFLINE=0 "
                f"{shlex.join(command)}`"
            )
        elif kinds & {"TransportError", "ConnectionError", "TimeoutError"}:
            advice = "check the name and the network, and try again"
            here = f"{failed}," if file else f"there is no directory {name} here, and"
            sentence = f"{here} the Hub cannot be reached or the connection was cut: {advice}"
        elif status:
            advice = "try again later, and check what your token may read"
            sentence = f"{failed}, the Hub answers {status}: {advice}"
        else:
            advice = "check HF_ENDPOINT, and the room of HF_HOME"
            sentence = f"{failed}: {first_line(problem):.300}: {advice}"
        return SourceError(sentence)


def _bar(report: Callable[[int], None]) -> type[utils.tqdm]:
    """Return a progress bar for huggingface_hub that shows nothing and reports bytes."""

    class SilentBar(utils.tqdm):
        def __init__(self, *arguments: Any, initial: int = 0, **options: Any) -> None:
            super().__init__(disable=True, initial=initial)
            report(initial)

        def update(self, n: float | None = 1) -> None:
            self.n += int(n or 0)
            report(int(n or 0))

        def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
            super().__exit__(kind, *rest)
            if kind is not None:
                report(-self.n)  # the bytes that are kept are the next bar's `initial`

        def update_transfer(self, n: float | None = 1) -> None:
            """Ignore the bytes of Xet's network traffic."""

        set_transfer_postfix_str = utils.tqdm.set_postfix_str

    return SilentBar
