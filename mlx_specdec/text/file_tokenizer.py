"""How long a tokenizer.json makes a text: bounded before any of its steps runs.

A normalizer prepends and replaces what its file says, and each step multiplies what those before it
made: three that write a thousand letters for one make gigabytes of a short prompt. Added tokens are
normalized while the file is loaded, so its text is looked at first.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import CheckpointError, first_line
from . import chat
from .chat import Ending, Messages
from .tokenizer_files import Growth, content_of, digest_of, no_panic
from .transformers_tokenizer import by_id, from_transformers

LONG = 1000
"""Tokens that are decoded as a batch of one, which lets other threads run meanwhile."""


class FileTokenizer:
    """tokenizer.json, read by the `tokenizers` library.

    ends_with_eos: close every prompt with the end-of-sequence token, as T5 does. made: the
    library's tokenizer, where other files than tokenizer.json say what it is.
    """

    def __init__(
        self,
        directory: Path,
        settings: dict[str, Any],
        *,
        ends_with_eos: bool = False,
        made: Any = None,
    ) -> None:
        self._directory = directory
        self._growth: Growth | None = None
        if made is None:
            made, self._growth = _from_file(directory / "tokenizer.json")
        self._tokenizer = made
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokenizer.token_to_id(content_of(settings.get("eos_token")) or "</s>")
        self.eos_token_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._closing = self.eos_token_ids if ends_with_eos else ()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size: int = max(vocabulary.values(), default=-1) + 1
        self.has_chat_template = "chat_template" in settings or any(
            directory.glob("chat_template*")
        )

    @property
    def digest(self) -> str:
        return digest_of(self._directory)

    def encode(self, text: str) -> list[int]:
        with no_panic(self._directory):
            self._check(text)
            # Other than `encode`, this lets other threads run meanwhile.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            ids: list[int] = encoding.ids
        return ids if ids and ids[-1:] == [*self._closing] else [*ids, *self._closing]

    def decode(self, ids: Sequence[int]) -> str:
        with no_panic(self._directory):
            if len(ids) < LONG:
                return self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        with no_panic(self._directory):
            return chat.apply(self.templated, prompt, settings, ending=ending, check=self._check)

    @functools.cached_property
    def templated(self) -> Any:
        """transformers' tokenizer, which has the chat template; reading it takes as long as many
        chats."""
        return from_transformers(self._directory)

    def pieces(self) -> list[str | None]:
        return by_id(self._tokenizer.get_vocab(with_added_tokens=True), self.size)

    def _check(self, text: str) -> None:
        if self._growth is not None:
            self._growth.check(text)


def _from_file(file: Path) -> tuple[Any, Growth]:
    from tokenizers import Tokenizer as Loaded

    try:
        text = file.read_text(encoding="utf-8")
        growth = Growth(file, text)
        with no_panic(file.parent, " as it is read"):
            return Loaded.from_str(text), growth
    except CheckpointError:
        raise
    except Exception as problem:  # the library raises plain Exception
        raise CheckpointError(
            f"{file} is damaged ({first_line(problem)}): download it again"
        ) from None
