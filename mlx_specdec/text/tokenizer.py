"""Text <-> token ids, by the files of a checkpoint.

Encoder-decoder checkpoints with tokenizer.json or spiece.model never import transformers;
decoder-only ones do for a chat template, or where they have no tokenizer.json.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.disk import check_regular, read_json
from ..checkpoints.files import has_vocabulary
from ..errors import CheckpointError
from .chat import Ending, Messages

Kind = Literal["encoder-decoder", "decoder-only"]


class Tokenizer(ABC):
    """What the rest of the program needs of a tokenizer.

    eos_token_ids: ids that end a text, as far as the tokenizer knows. special_ids: ids that are
    never printed. size: highest id + 1; a model's logits may be wider, by padding.
    has_chat_template: whether `apply_chat` works. digest: of the files that it was read from.
    """

    eos_token_ids: tuple[int, ...] = ()
    special_ids: frozenset[int] = frozenset()
    size: int
    has_chat_template: bool = False

    @property
    @abstractmethod
    def digest(self) -> str: ...

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids as the model expects them, with the special tokens that belong around a prompt."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens left out."""

    @abstractmethod
    def pieces(self) -> list[str | None]:
        """The token of each id, None where an id has none; as long as `size`."""

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        """Ids of messages, or of a text as the user's only one. settings: see `chat.apply`.

        Raises CheckpointError without a template, or where it fails."""
        raise CheckpointError("this model has no chat template")


def load_tokenizer(directory: Path, *, kind: Kind) -> Tokenizer:
    """Load the tokenizer of a checkpoint directory.

    Raises CheckpointError where its files are missing or damaged, or know no text.
    """
    from .file_tokenizer import FileTokenizer, SentencePieceTokenizer, TransformersTokenizer

    for name in ("tokenizer.json", "spiece.model", "tokenizer.model"):
        check_regular(directory / name)
    named = (directory / "config.json", directory / "tokenizer_config.json")
    config, settings = (read_json(file) if file.is_file() else {} for file in named)
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory, settings, ends_with_eos=kind == "encoder-decoder")
    elif kind == "encoder-decoder" and (directory / "spiece.model").is_file():
        return SentencePieceTokenizer(directory, settings)
    kind_named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    # transformers makes an empty tokenizer of a class's name alone; of ByT5's it is a whole one.
    if kind_named != "ByT5Tokenizer" and not has_vocabulary(directory):
        raise CheckpointError(
            f"{directory} has no tokenizer that can be read: download its vocabulary, "
            "tokenizer.json or tokenizer.model"
        )
    # CodeT5's files need not name their class.
    usual = "roberta" if kind == "encoder-decoder" and not kind_named else None
    return TransformersTokenizer(directory, usual)


class StandInTokenizer(Tokenizer):
    """A tokenizer over `size` ids, the first of which are the bytes of UTF-8; for models without
    files."""

    def __init__(self, size: int) -> None:
        self.size = size

    @property
    def digest(self) -> str:
        return f"stand-in of {self.size}"

    def encode(self, text: str) -> list[int]:
        return [byte % self.size for byte in text.encode("utf-8")]

    def decode(self, ids: Sequence[int]) -> str:
        """One letter an id."""
        return "".join(chr(ord("a") + token % 26) for token in ids)

    def pieces(self) -> list[str | None]:
        """None for every id: nothing can be compared with a real vocabulary."""
        return [None] * self.size
