"""Text <-> token ids, by the files of a checkpoint.

Encoder-decoder checkpoints never import transformers; decoder-only ones do for a chat template, or
where they have no tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..checkpoints.disk import check_regular
from ..errors import CheckpointError
from . import t5_tokenizers
from .chat import Ending, Messages
from .file_tokenizer import FileTokenizer, TransformersTokenizer
from .tokenizer_files import read_json

Kind = Literal["encoder-decoder", "decoder-only"]


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    def __hash__(self) -> int:
        """By identity, for tables of what was computed from a tokenizer."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, as far as the tokenizer knows."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that are never printed."""
        ...

    @property
    def size(self) -> int:
        """Highest id + 1; a model's logits may be wider, by padding."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` works."""
        ...

    @property
    def digest(self) -> str:
        """Digest of the files that it was read from."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids as the model expects them, with the special tokens that belong around a prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""
        ...

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        """Ids of messages, or of a text as the user's only one. settings: see `chat.apply`.

        Raises CheckpointError without a template, or where it fails."""
        ...

    def pieces(self) -> list[str | None]:
        """The token of each id, None where an id has none; as long as `size`."""
        ...


def load_tokenizer(directory: Path, *, kind: Kind) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    Raises CheckpointError where its files are missing or damaged, or know no text.
    """
    for name in ("tokenizer.json", "spiece.model", "tokenizer.model"):
        check_regular(directory / name)
    settings = read_json(directory / "tokenizer_config.json")
    tokenizer: Tokenizer
    if (directory / "tokenizer.json").is_file():
        tokenizer = FileTokenizer(directory, settings, ends_with_eos=kind == "encoder-decoder")
    elif kind == "encoder-decoder":
        tokenizer = t5_tokenizers.load(directory, settings)
    else:
        tokenizer = TransformersTokenizer(directory)
    # transformers makes an empty one of the class's name alone.
    if tokenizer.size <= len(tokenizer.special_ids):
        raise CheckpointError(
            f"{directory} has no tokenizer that knows any text: download its tokenizer.json"
        )
    return tokenizer


class StandInTokenizer:
    """A Tokenizer over `size` ids, the first of which are the bytes of UTF-8; for models without
    files."""

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
