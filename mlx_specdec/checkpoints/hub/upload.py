"""A converted model -> a repository of the Hub: decoder-only models by mlx-lm's own helper, T5
models and drafters, which mlx-lm cannot load, with a card of our own."""

from __future__ import annotations

import re
from pathlib import Path

from ...errors import OptionError, OutputError, first_line
from .problems import is_network

_REPOSITORY = re.compile(r"(?!.*(--|\.\.))\w[\w.-]*/\w[\w.-]*", re.ASCII)


def check_repository(name: str) -> None:
    """Raises OptionError for what cannot be the name of a repository."""
    if not _REPOSITORY.fullmatch(name):
        raise OptionError(f"{name!a:.100} cannot be a repository: give --upload-repo USER/NAME")


def upload(
    directory: Path, repository: str, *, base_model: str | None, by_mlx_lm: bool, drafts: bool
) -> None:
    """Write a model card into `directory` and upload all of it. base_model: the Hub name that it
    was converted from, if it was one. drafts: it is no whole model. Raises OutputError."""
    usage = "" if by_mlx_lm else f"--model {repository}"
    usage = f"--model TARGET --draft-model {repository}" if drafts else usage
    _write_card(directory / "README.md", repository, base_model, usage)
    try:
        if not (by_mlx_lm and _by_mlx_lm(directory, repository)):
            import huggingface_hub as hub

            api = hub.HfApi()
            api.create_repo(repo_id=repository, exist_ok=True)
            api.upload_folder(folder_path=str(directory), repo_id=repository, repo_type="model")
    except Exception as problem:  # whatever its HTTP library raises has no common base
        first = "check the network" if is_network(problem) else "run `hf auth login`"
        raise OutputError(
            f"{directory} is converted, and cannot be uploaded to {repository}: "
            f"{first_line(problem):.300}: {first}, then run `hf upload {repository} {directory}`"
        ) from problem


def _by_mlx_lm(directory: Path, repository: str) -> bool:
    """Let mlx-lm's helper write the card and upload; whether it could do the second."""
    import huggingface_hub as hub
    from mlx_lm.utils import upload_to_hub

    try:
        upload_to_hub(str(directory), repository)
    except AttributeError:
        # mlx-lm 0.32 asks for a function that huggingface_hub 2 has no more, after all else.
        if hasattr(hub.HfApi, "upload_large_folder"):
            raise
        return False
    return True


def _write_card(file: Path, repository: str, base_model: str | None, usage: str) -> None:
    lines = ["---", "library_name: mlx", "tags:", "- mlx"]
    lines += [f"base_model: {base_model}"] if base_model is not None else []
    lines += ["---", "", f"# {repository}", ""]
    if usage:
        lines += ["Converted with mlx-specdec; provenance.json says from what and how.", ""]
        lines += [f'    mlx-specdec generate {usage} "..."', ""]
    try:
        file.write_text("\n".join(lines), encoding="utf-8")
    except OSError as problem:
        raise OutputError(f"{file} cannot be written: {problem.strerror}") from problem
