"""Text <-> token ids, from a checkpoint's own files.

Knows tokenizer files. Knows nothing of models. Encoder-decoder checkpoints never import
transformers; a decoder-only one does for a chat template, or where it has no tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..checkpoints.disk.regular import check_regular
from ..errors import CheckpointError, first_line
from . import byte_level_bpe
from .byte_tokenizer import ByteTokenizer
from .sentence_piece import SentencePieceTokenizer
from .tokenizer_files import content_of, digest_of, read_json

Kind = Literal["encoder-decoder", "decoder-only"]


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

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

    def apply_chat(self, text: str) -> list[int]:
        """Ids of `text` as one user message, up to where the answer begins."""
        ...

    def pieces(self) -> list[str | None]:
        """The token of each id, None where an id has none; as long as `size`."""
        ...


def load_tokenizer(directory: Path, *, kind: Kind) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises CheckpointError where its files are missing or damaged.
    """
    for name in ("tokenizer.json", "spiece.model", "tokenizer.model"):
        check_regular(directory / name)
    settings = read_json(directory / "tokenizer_config.json")
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory, settings, ends_with_eos=kind == "encoder-decoder")
    if kind == "encoder-decoder":
        return _of_encoder_decoder(directory, settings)
    return TransformersTokenizer(directory)


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
        self._tokenizer = _from_file(directory / "tokenizer.json") if made is None else made
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokenizer.token_to_id(content_of(settings.get("eos_token")) or "</s>")
        self._eos = () if eos is None else (eos,)
        self._closing = self._eos if ends_with_eos else ()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(vocabulary.values(), default=-1) + 1
        self._template = "chat_template" in settings or any(directory.glob("chat_template*"))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def size(self) -> int:
        return self._size

    @property
    def has_chat_template(self) -> bool:
        return self._template

    @property
    def digest(self) -> str:
        return digest_of(self._directory)

    def encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text).ids
        if self._closing and (not ids or ids[-1] not in self._closing):
            ids = [*ids, self._closing[0]]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def apply_chat(self, text: str) -> list[int]:
        return _apply_chat(_from_transformers(self._directory), text)

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(with_added_tokens=True), self._size)


class TransformersTokenizer:
    """What only transformers can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._tokenizer = _from_transformers(directory)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.all_special_ids)

    @property
    def size(self) -> int:
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    @property
    def digest(self) -> str:
        return digest_of(self._directory)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def apply_chat(self, text: str) -> list[int]:
        return _apply_chat(self._tokenizer, text)

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(), self.size)


def _of_encoder_decoder(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a T5 without tokenizer.json."""
    named = settings.get("tokenizer_class") or read_json(directory / "config.json").get(
        "tokenizer_class"
    )
    if named == "ByT5Tokenizer":
        return ByteTokenizer(settings, read_json(directory / "added_tokens.json"))
    if (directory / "spiece.model").is_file():
        return SentencePieceTokenizer(directory, settings)
    if not byte_level_bpe.is_here(directory):
        raise CheckpointError(
            f"{directory} has no tokenizer.json, no spiece.model, and no vocab.json with merges.txt"
        )
    settings = read_json(directory / "special_tokens_map.json") | settings
    added = read_json(directory / "added_tokens.json")
    read = byte_level_bpe.read(directory, named, settings, added)
    return FileTokenizer(directory, settings, ends_with_eos=read.closes, made=read.tokenizer)


def _from_file(file: Path) -> Any:
    from tokenizers import Tokenizer as Loaded

    try:
        return Loaded.from_file(str(file))
    except Exception as problem:  # the library raises plain Exception
        raise CheckpointError(
            f"{file} is damaged ({first_line(problem)}): download it again"
        ) from None


def _from_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # many kinds, depending on the file that is wrong
        raise CheckpointError(
            f"{directory} has no tokenizer that can be read ({first_line(problem)})"
        ) from None


def _apply_chat(tokenizer: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    try:
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )
    except Exception as problem:  # templates are programs and fail in their own ways
        raise CheckpointError(
            f"the chat template cannot be applied ({first_line(problem)}): use --no-chat-template"
        ) from None


def _by_id(vocabulary: dict[str, int], size: int) -> list[str | None]:
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces
