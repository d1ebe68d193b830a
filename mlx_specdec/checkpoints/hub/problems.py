"""What huggingface_hub raises -> one sentence that says what is wrong and what to do."""

from __future__ import annotations

import os

from ...errors import SourceError, first_line


def told(name: str, revision: str, problem: Exception) -> SourceError:
    """The same as an error of ours. name: of the repository, or "FILE of REPOSITORY"."""
    from huggingface_hub import errors

    cause = problem.__cause__
    if isinstance(problem, errors.LocalEntryNotFoundError) and isinstance(cause, Exception):
        return told(name, revision, cause)
    repository = name.rpartition(" ")[2]
    absent = f"there is no directory {repository}, it is not in the Hub's cache"
    if isinstance(problem, SourceError):
        return problem
    if isinstance(problem, errors.GatedRepoError):
        sentence = (
            f"{repository} is gated: accept its terms on huggingface.co/{repository}, then run "
            "`hf auth login`"
        )
    elif isinstance(problem, errors.RevisionNotFoundError):
        sentence = f"{repository} has no revision {revision}: check --revision"
    elif isinstance(problem, errors.RepositoryNotFoundError) or status(problem) == 401:
        sentence = (
            f"{repository} is neither a directory here nor a repository on the Hub that you may "
            "read: check the name, or run `hf auth login` if it is private"
        )
    elif isinstance(problem, errors.OfflineModeIsEnabled):
        sentence = f"{absent}, and HF_HUB_OFFLINE forbids to download it"
    elif is_network(problem):
        sentence = (
            f"{name} cannot be downloaded, the Hub cannot be reached or the connection was cut: "
            "check the name and the network, and try again"
        )
    elif isinstance(problem, errors.HfHubHTTPError):
        advice = "check what your token may read" if status(problem) == 403 else "try again later"
        sentence = f"{name} cannot be downloaded, the Hub answers {status(problem)}: {advice}"
    elif isinstance(problem, OSError) and problem.errno:
        sentence = (
            f"{name} cannot be downloaded, the Hub's cache cannot be written: "
            f"{os.strerror(problem.errno)}: make room, or set HF_HOME to a place of your own"
        )
    else:
        sentence = (
            f"{name} cannot be downloaded: {first_line(problem):.300}: try again, and check "
            "HF_ENDPOINT and the proxy"
        )
    return SourceError(sentence)


def status(problem: Exception) -> int:
    """The status code that an HTTP server answered with; 0 for another problem."""
    return getattr(getattr(problem, "response", None), "status_code", 0)


def is_network(problem: Exception) -> bool:
    """Whether a server could not be reached, took too long, or the connection broke."""
    # By name: which library does HTTP is huggingface_hub's affair, and has changed.
    kinds = {kind.__name__ for kind in type(problem).__mro__}
    return bool(kinds & {"TransportError", "ConnectionError", "TimeoutError"})
