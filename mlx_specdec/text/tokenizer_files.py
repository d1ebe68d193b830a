"""What tokenizers share: their files, the letters of bytes, and a panic caught."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.disk.reading import read_json as read_object
from ..errors import CheckpointError, first_line, is_panic

FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""
MOST_EXTRA = 100_000
"""Sentinels that are believed."""


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


def extra_ids(settings: Mapping[str, Any], default: int) -> int:
    """How many sentinels there are, <extra_id_0> and on. Raises CheckpointError for no number."""
    count = settings.get("extra_ids")
    count = default if count is None else count
    if type(count) is not int or not 0 <= count <= MOST_EXTRA:
        raise CheckpointError(f"tokenizer_config.json has extra_ids {count!r}: need a whole number")
    return count


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


@contextlib.contextmanager
def no_panic(directory: Path, where: str = " on this text") -> Iterator[None]:
    """Raises CheckpointError, of a tokenizer's directory, where the library panics.

    Rust has told standard error of it by then; to keep that from there would take the whole
    process's standard error away from everybody else.
    """
    try:
        yield
    except BaseException as problem:
        if not is_panic(problem):
            raise
        raise CheckpointError(
            f"the tokenizer of {directory} fails{where} ({first_line(problem):.100}): download its "
            "tokenizer.json again"
        ) from None


def _letters() -> list[str]:
    # Printable bytes are themselves, the others U+0100 and on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


LETTERS = _letters()
"""The letter in which byte-level BPE (GPT-2's, RoBERTa's) writes each byte."""
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}
