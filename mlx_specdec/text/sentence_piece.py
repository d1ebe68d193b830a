"""spiece.model, T5's and mT5's vocabulary, with the sentinels that lie behind it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line
from .chat import Messages
from .tokenizer_files import digest_of, extra_ids

EXTRA = 100
"""T5's sentinels, where nothing says how many there are."""
_SENTINEL = re.compile(r" *<extra_id_(\d{1,6})> *", re.ASCII)


def read(file: Path) -> Any:
    """sentencepiece's own object. Raises CheckpointError for a damaged file."""
    import sentencepiece

    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError) as problem:
        raise CheckpointError(
            f"{file} is damaged ({first_line(problem)}): download it again"
        ) from None


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
        # Every second part is the number of a sentinel; spaces around sentinels belong to them.
        for place, part in enumerate(_SENTINEL.split(text)):
            if place % 2 == 0:
                ids += self._processor.encode(part)
            elif int(part) < self._extra:
                ids.append(self.size - 1 - int(part))
            else:
                ids += self._processor.encode(f"<extra_id_{part}>")
        return [*ids, *self.eos_token_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self.special_ids])

    def apply_chat(
        self, prompt: str | Messages, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        own: list[str | None] = [self._processor.id_to_piece(id) for id in range(self._own)]
        return own + [f"<extra_id_{index}>" for index in reversed(range(self._extra))]

    def _extra_ids(self, settings: dict[str, Any]) -> int:
        """How many there are behind the model's own pieces, some of which may be them (mT5's)."""
        last = str(self._processor.id_to_piece(self._own - 1)) if self._own else ""
        return extra_ids(settings, 0 if "<extra_id_" in last else EXTRA)
