"""A tokenizer for models whose own is not there: bytes in, one letter a token out.

For measuring; its text means nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError
from .chat import Ending, Messages


class StandInTokenizer:
    """text.tokenizer.Tokenizer over `size` ids, the first of which are the bytes of UTF-8."""

    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    has_chat_template = False

    def __init__(self, size: int) -> None:
        self.size = size
        self.digest = f"stand-in of {size}"

    def encode(self, text: str) -> list[int]:
        """One id a byte."""
        return [byte % self.size for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        """One letter an id."""
        return "".join(chr(ord("a") + token % 26) for token in ids)

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        """There is no template to apply."""
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        """None for every id: nothing can be compared with a real vocabulary."""
        return [None] * self.size
