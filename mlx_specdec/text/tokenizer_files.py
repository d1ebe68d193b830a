"""What tokenizers share: their files, special tokens, the letters of bytes, a caught panic."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.disk import read_json as read_object
from ..errors import CheckpointError, first_line, is_panic
from .chat import Ending, Messages

FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""
GROWTH = 64
"""Letters that a file may make of one: Unicode's forms alone make 18."""
MOST_EXTRA = 100_000
"""Sentinels that a file may have."""
_NORMALIZERS, _CHARSMAP = (3, 5), 2
"""Fields of sentencepiece's ModelProto that hold normalizers, the second one the decoder's, and the
field of each that holds its character map."""


class DirectoryTokenizer:
    """What tokenizers of a checkpoint's directory have in common; see tokenizer.Tokenizer."""

    eos_token_ids: tuple[int, ...]
    special_ids: frozenset[int]
    size: int
    has_chat_template = False

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def digest(self) -> str:
        """Digest of all files that the tokenizer may consist of."""
        whole = hashlib.blake2b(digest_size=16)
        found = {file for pattern in FILES for file in self._directory.glob(pattern)}
        for file in sorted(filter(Path.is_file, found)):
            whole.update(file.name.encode() + b"\0")
            whole.update(hashlib.blake2b(file.read_bytes()).digest())
        return whole.hexdigest()

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        raise CheckpointError("this model has no chat template")


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, {} where there is no file."""
    return read_object(file) if file.is_file() else {}


def content_of(token: Any) -> str | None:
    """Return a special token's text, given as text or as an object; None for anything else."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def extra_ids(settings: Mapping[str, Any], default: int) -> int:
    """How many sentinels there are, <extra_id_0> and on. Raises CheckpointError for no number."""
    count = settings.get("extra_ids")
    count = default if count is None else count
    if type(count) is not int or not 0 <= count <= MOST_EXTRA:
        raise CheckpointError(f"tokenizer_config.json has extra_ids {count!r}: need a whole number")
    return count


def _letters() -> list[str]:
    # Printable bytes are themselves, the others U+0100 and on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


LETTERS = _letters()
"""The letter in which byte-level BPE (GPT-2's, RoBERTa's) writes each byte."""
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


@contextlib.contextmanager
def no_panic(directory: Path, where: str = " on this text") -> Iterator[None]:
    """Raise CheckpointError, of a tokenizer's directory, where the library panics.

    Rust has written to standard error by then; to hide that would take the whole process's standard
    error away from everybody else.
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


def read_sentence_piece(file: Path) -> Any:
    """Read sentencepiece's own object. Raises CheckpointError for a damaged file, and for one that
    makes far more of a text than any tokenizer does."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        normalizers = (part for field, part in _fields(file.read_bytes()) if field in _NORMALIZERS)
        charsmaps = (
            map for each in normalizers for field, map in _fields(each) if field == _CHARSMAP
        )
        growth = max(map(longest, filter(None, charsmaps)), default=1)
    except (RuntimeError, OSError, IndexError) as problem:
        raise CheckpointError(
            f"{file} is damaged ({first_line(problem)}): download it again"
        ) from None
    if growth > GROWTH:
        raise CheckpointError(
            f"{file} is refused: it writes more than {GROWTH} letters for a few; take the file of "
            "the model's makers"
        )
    return processor


def longest(charsmap: bytes) -> int:
    """Letters, or a few more, of the longest text that a precompiled charsmap writes for another.

    Format: the size of a trie (uint32, little endian), the trie, and texts that end with a zero.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a protobuf message; of numbers no content."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, size = key & 7, 0
        if kind == 0:
            _, at = _varint(message, at)
        elif kind == 2:
            size, at = _varint(message, at)
        else:
            at += 8 if kind == 1 else 4
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number, and where it ends."""
    value = shift = 0
    while message[at] & 0x80:
        value |= (message[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
    return value | message[at] << shift, at + 1
