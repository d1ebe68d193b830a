"""Files of a tokenizer: JSON, and a digest of all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.disk.reading import read_json as read_object
from ..errors import CheckpointError

FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no file."""
    return read_object(file) if file.is_file() else {}


def digest_of(directory: Path) -> str:
    """Of all that a tokenizer may consist of."""
    whole = hashlib.blake2b(digest_size=16)
    files = {file for pattern in FILES for file in directory.glob(pattern) if file.is_file()}
    for file in sorted(files):
        whole.update(file.name.encode() + b"\0")
        whole.update(hashlib.blake2b(file.read_bytes()).digest())
    return whole.hexdigest()


def content_of(token: Any) -> str | None:
    """A special token's text, given as text or as an object; None for anything else."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def ids_of_added(where: object, decoder: Any, added: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens that were added to a vocabulary.

    decoder: added_tokens_decoder of tokenizer_config.json, id -> token. added: added_tokens.json,
    token -> id, which is believed first. Raises CheckpointError, of `where`, for what is no id.
    """
    told = decoder.items() if isinstance(decoder, Mapping) else ()
    try:
        ids = {text: int(id) for id, token in told if (text := content_of(token))}
        return ids | {token: int(id) for token, id in added.items()}
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{where} has an added token whose id is no number: download its tokenizer again"
        ) from None
