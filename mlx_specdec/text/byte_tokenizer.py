"""Text <-> bytes as ids, as ByT5 has them: padding, end and unknown, 256 bytes, then sentinels.

The convention is that of arXiv 2105.13626, section 3, and what a tokenizer_config.json may add to
it; there is no vocabulary file to read. transformers has it too, in a second that no T5 is to pay.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from .byte_letters import LETTERS
from .chat import Messages
from .tokenizer_files import content_of, ids_of_added

FIRST, BYTES = 3, 256
"""Byte b is id b + FIRST."""
EXTRA = 125
LONGEST_EXTRA = 100_000
_NAMED = ("pad_token", "eos_token", "unk_token")
_CONVENTION = ("<pad>", "</s>", "<unk>")


class ByteTokenizer:
    """text.tokenizer.Tokenizer over bytes.

    settings: tokenizer_config.json; it may rename special tokens and add others behind the bytes.
    added: added_tokens.json, token -> id. Raises CheckpointError where they contradict the
    convention.
    """

    eos_token_ids: tuple[int, ...] = (1,)
    has_chat_template = False

    def __init__(self, settings: Mapping[str, Any], added: Mapping[str, Any] | None = None) -> None:
        first = [
            content_of(settings.get(key)) or own
            for key, own in zip(_NAMED, _CONVENTION, strict=True)
        ]
        behind = _behind(settings, added or {})
        self._ids = behind | {token: id for id, token in enumerate(first)}
        self.size = max([FIRST + BYTES - 1, *behind.values()]) + 1
        self.special_ids = frozenset([*range(FIRST), *behind.values()])
        self._swallows = [_swallows(settings, key, id) for id, key in enumerate(_NAMED)]
        # Where one name begins another the longer one is meant.
        names = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)))

    @property
    def digest(self) -> str:
        """Of what it does, since there are no files that matter."""
        return hashlib.blake2b(repr(sorted(self._ids.items())).encode(), digest_size=16).hexdigest()

    def encode(self, text: str) -> list[int]:
        """One id a byte of UTF-8, one a special token written out, and the end."""
        ids: list[int] = []
        done, swallows = 0, False
        for match in self._special.finditer(text):
            id, before = self._ids[match[0]], text[done : match.start()]
            before = before.lstrip() if swallows else before
            leads, swallows = self._swallows[id] if id < FIRST else (False, False)
            ids += [*_bytes(before.rstrip() if leads else before), id]
            done = match.end()
        ids += _bytes(text[done:].lstrip() if swallows else text[done:])
        return ids if ids[-1:] == [1] else [*ids, 1]

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are no UTF-8 are left out."""
        bytes_only = [id - FIRST for id in ids if FIRST <= id < FIRST + BYTES]
        return bytes(bytes_only).decode("utf-8", errors="ignore")

    def apply_chat(
        self, prompt: str | Messages, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        """There is no template to apply."""
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        """Bytes in the letters of byte-level BPE, so that vocabularies compare by meaning."""
        pieces: list[str | None] = [None] * self.size
        pieces[FIRST : FIRST + BYTES] = LETTERS
        for token, id in self._ids.items():
            pieces[id] = token
        return pieces


def _bytes(text: str) -> list[int]:
    return [byte + FIRST for byte in text.encode("utf-8", errors="replace")]


def _behind(settings: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, int]:
    """Tokens behind the bytes: where a file says their ids these, else in the order listed."""
    placed = ids_of_added("this ByT5", settings.get("added_tokens_decoder"), added)
    placed = {token: id for token, id in placed.items() if not 0 <= id < FIRST}
    if not placed:
        names = _listed(settings)
        placed = {token: FIRST + BYTES + place for place, token in enumerate(names)}
    for token, id in placed.items():
        if not FIRST + BYTES <= id < FIRST + BYTES + LONGEST_EXTRA:
            raise CheckpointError(f"{token!a:.60} has id {id}, which is no place behind the bytes")
    return placed


def _listed(settings: Mapping[str, Any]) -> list[str]:
    for key in ("additional_special_tokens", "extra_special_tokens"):
        tokens = settings.get(key)
        if isinstance(tokens, list) and tokens:
            return [token for each in tokens if (token := content_of(each))]
    count = settings.get("extra_ids")
    count = EXTRA if count is None else count
    if type(count) is not int or not 0 <= count <= LONGEST_EXTRA:
        raise CheckpointError(f"tokenizer_config.json has extra_ids {count!r}: need a whole number")
    return [f"<extra_id_{index}>" for index in range(count)]


def _swallows(settings: Mapping[str, Any], key: str, id: int) -> tuple[bool, bool]:
    """Whether a special token takes the spaces before and behind it; both unless told otherwise."""
    decoder = settings.get("added_tokens_decoder")
    said = decoder.get(str(id)) if isinstance(decoder, Mapping) else settings.get(key)
    said = said if isinstance(said, Mapping) else {}
    return bool(said.get("lstrip", True)), bool(said.get("rstrip", True))
