"""A tokenizer that only transformers can read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import files
from ..errors import CheckpointError, first_line
from . import chat, sentence_piece
from .chat import Ending, Messages
from .tokenizer_files import digest_of, no_panic

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""How tiktoken's files begin: a token in base 64, and its rank."""


class TransformersTokenizer:
    """What only transformers can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        file = directory / "tokenizer.model"
        if file.is_file() and not _TIKTOKEN.match(file.read_bytes()):
            # Of a damaged one transformers says that tiktoken is missing.
            sentence_piece.read(file)
        self._tokenizer = from_transformers(directory)
        eos = self._tokenizer.eos_token_id
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self.special_ids = frozenset(self._tokenizer.all_special_ids)
        self.size = len(self._tokenizer)
        self.has_chat_template = self._tokenizer.chat_template is not None

    @property
    def templated(self) -> Any:
        """transformers' tokenizer, which has the chat template."""
        return self._tokenizer

    @property
    def digest(self) -> str:
        return digest_of(self._directory)

    def encode(self, text: str) -> list[int]:
        with no_panic(self._directory):
            return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        with no_panic(self._directory):
            return self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        with no_panic(self._directory):
            return chat.apply(self._tokenizer, prompt, settings, ending=ending)

    def pieces(self) -> list[str | None]:
        return by_id(self._tokenizer.get_vocab(), self.size)


def from_transformers(directory: Path) -> Any:
    """transformers' own tokenizer. Raises CheckpointError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # many kinds, depending on the file that is wrong
        reason = f" ({first_line(problem)})"
        if not files.has_vocabulary(directory):
            reason = ": download its vocabulary, tokenizer.json or tokenizer.model"
        raise CheckpointError(f"{directory} has no tokenizer that can be read{reason}") from None


def by_id(vocabulary: dict[str, int], size: int) -> list[str | None]:
    """The token of each id, as Tokenizer.pieces says."""
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces
