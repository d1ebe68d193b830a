"""What huggingface_hub raises -> one sentence that says what is wrong and what to do.

Knows its errors, those of HTTP and of the disk. Knows nothing of what was to be fetched but names.
"""

from __future__ import annotations

import errno
import os

from ...errors import SourceError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EIO)


def told(name: str, revision: str | None, file: str | None, problem: Exception) -> SourceError:
    """The same as an error of ours. file: what was being fetched; None for the repository's list
    of files."""
    return SourceError(_sentence(name, revision, file, problem))


def _sentence(name: str, revision: str | None, file: str | None, problem: Exception) -> str:
    from huggingface_hub import errors

    if isinstance(problem, SourceError):
        return str(problem)
    if isinstance(problem, errors.LocalEntryNotFoundError) and isinstance(
        problem.__cause__, Exception
    ):
        return _sentence(name, revision, file, problem.__cause__)
    what = name if file is None else f"{file} of {name}"
    if isinstance(problem, errors.GatedRepoError):
        return (
            f"{name} is gated: accept its terms on huggingface.co/{name}, then run `hf auth login`"
        )
    if isinstance(problem, errors.RevisionNotFoundError):
        return f"{name} has no revision {revision}: check --revision"
    if isinstance(problem, errors.RepositoryNotFoundError):
        return _unknown(name)
    if isinstance(problem, errors.DisabledRepoError):
        return f"{name} has been disabled on the Hub: choose another model"
    if isinstance(problem, errors.OfflineModeIsEnabled):
        return (
            f"there is no directory {name}, it is not in the Hub's cache, and HF_HUB_OFFLINE "
            "forbids to download it"
        )
    if isinstance(problem, errors.HfHubHTTPError):
        return _status(name, what, problem)
    if isinstance(problem, errors.FileMetadataError):
        return strange(name)
    return _network(name, what, problem) or _disk(name, problem) or _other(what, problem)


def is_reset(problem: Exception) -> bool:
    """Whether a connection broke while a file was read."""
    return "ReadError" in _kinds(problem)


def strange(name: str) -> str:
    """For an answer that no Hub gives."""
    return (
        f"{name} cannot be downloaded, what answers is no Hub: check HF_ENDPOINT, the proxy and "
        "the network"
    )


def partial(name: str, problem: Exception, reason: str) -> str:
    """For a repository of which the cache holds too little, where no more can be had."""
    from huggingface_hub import errors

    start = f"the Hub's cache holds only a part of {name}, and "
    if isinstance(problem, errors.OfflineModeIsEnabled):
        return f"{start}HF_HUB_OFFLINE forbids to download the rest: unset it"
    return f"{start}the rest cannot be had: {reason}"


def _unknown(name: str) -> str:
    return (
        f"{name} is neither a directory here nor a repository on the Hub that you may read: "
        "check the name, or run `hf auth login` if it is private"
    )


def _status(name: str, what: str, problem: Exception) -> str:
    response = getattr(problem, "response", None)
    status = getattr(response, "status_code", 0)
    if status == 401:
        if "credentials" in str(problem).lower():
            return "the Hub does not know your token: run `hf auth login`, or renew HF_TOKEN"
        return _unknown(name)
    if status == 403:
        return f"the Hub does not let your token read {what}: give it that right, or take another"
    if status == 404:
        return f"the Hub has no {what}: try again, or choose another --revision"
    if status == 429:
        return f"{what} cannot be downloaded yet, the Hub has had too many requests: wait a while"
    if status >= 500:
        return f"{what} cannot be downloaded, the Hub answers with error {status}: try again later"
    return _other(what, problem)


def _network(name: str, what: str, problem: Exception) -> str | None:
    kinds = _kinds(problem)
    if "ProxyError" in kinds:
        return f"{what} cannot be downloaded, the proxy refuses: check HTTPS_PROXY"
    if kinds & {"ConnectError", "ConnectTimeout", "UnsupportedProtocol"}:
        return (
            f"there is no directory {name}, it is not in the Hub's cache, and the Hub cannot be "
            "reached: check the name and the network"
        )
    if "TimeoutException" in kinds:
        return (
            f"{what} cannot be downloaded, the Hub takes too long to answer: try again, or set "
            "HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT to more seconds"
        )
    if kinds & {"TransportError", "ConnectionError"}:
        return f"{what} cannot be downloaded, the connection was cut: try again"
    return None


def _kinds(problem: Exception) -> set[str]:
    """By name: which library does HTTP is huggingface_hub's affair, and has changed."""
    return {kind.__name__ for kind in type(problem).__mro__}


def _disk(name: str, problem: Exception) -> str | None:
    if not isinstance(problem, OSError):
        return None
    if problem.errno in _FULL:
        return f"{name} cannot be downloaded, the disk is full: make room and try again"
    if problem.errno in _REFUSED:
        reason = os.strerror(problem.errno)
        return f"the Hub's cache cannot be written: {reason}: set HF_HOME to a place of your own"
    return None


def _other(what: str, problem: Exception) -> str:
    if str(problem).startswith("Consistency check failed"):
        return f"{what} did not arrive whole: try again"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    return f"{what} cannot be downloaded: {lines[0] if lines else type(problem).__name__}"
