"""spiece.model, T5's and mT5's vocabulary, with the sentinels that lie behind it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line
from .chat import Ending, Messages
from .tokenizer_files import GROWTH, digest_of, extra_ids, longest

EXTRA = 100
"""T5's sentinels, where nothing says how many there are."""
_NORMALIZERS, _CHARSMAP = (3, 5), 2
"""Numbers of fields: the normalizers of ModelProto (one is of the decoder), and in each the map."""
_SENTINEL = re.compile(r"<extra_id_(\d{1,6})>", re.ASCII)


def read(file: Path) -> Any:
    """sentencepiece's own object. Raises CheckpointError for a damaged file, and for one that
    makes far more of a text than any tokenizer does."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        growth = _growth(file.read_bytes())
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


def _growth(model: bytes) -> int:
    """How long the longest text is that the normalizers write for another, of a file that could
    be read. Format: ModelProto in sentencepiece_model.proto."""
    normalizers = (part for field, part in _fields(model) if field in _NORMALIZERS)
    charsmaps = (map for each in normalizers for field, map in _fields(each) if field == _CHARSMAP)
    return max(map(longest, filter(None, charsmaps)), default=1)


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


class SentencePieceTokenizer:
    """spiece.model, read by sentencepiece, with T5's extra ids behind it.

    <extra_id_0> has the highest id of all, the next one the id before it.
    """

    has_chat_template = False

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        self._directory = directory
        file = directory / "spiece.model"
        self._processor = read(file)
        self._own: int = self._processor.get_piece_size()
        self._extra = self._extra_ids(settings)
        self.size = self._own + self._extra
        eos = self._processor.eos_id()
        self.eos_token_ids: tuple[int, ...] = () if eos < 0 else (eos,)
        controls = [id for id in range(self._own) if self._processor.is_control(id)]
        self.special_ids = frozenset([*controls, *range(self._own, self.size)])

    @property
    def digest(self) -> str:
        return digest_of(self._directory)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        # Every second part is the number of a sentinel.
        parts = _SENTINEL.split(text)
        for place, part in enumerate(parts):
            if place % 2 == 0:
                # Spaces around sentinels belong to them.
                part = part if place == 0 else part.lstrip(" ")
                part = part if place == len(parts) - 1 else part.rstrip(" ")
                ids += self._processor.encode(part)
            elif int(part) < self._extra:
                ids.append(self.size - 1 - int(part))
            else:
                ids += self._processor.encode(f"<extra_id_{part}>")
        return [*ids, *self.eos_token_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self.special_ids])

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        own: list[str | None] = [self._processor.id_to_piece(id) for id in range(self._own)]
        return own + [f"<extra_id_{index}>" for index in reversed(range(self._extra))]

    def _extra_ids(self, settings: dict[str, Any]) -> int:
        """How many there are behind the model's own pieces, some of which may be them (mT5's)."""
        last = str(self._processor.id_to_piece(self._own - 1)) if self._own else ""
        return extra_ids(settings, 0 if "<extra_id_" in last else EXTRA)
