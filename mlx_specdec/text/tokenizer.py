"""Text <-> token ids, from a checkpoint's own files.

Knows tokenizer files. Knows nothing of models. Encoder-decoder checkpoints never import
transformers; a decoder-only one does for a chat template, or where it has no tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import CheckpointError

Kind = Literal["encoder-decoder", "decoder-only"]
FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""


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
    settings = _settings(directory)
    if (directory / "tokenizer.json").is_file():
        return FileTokenizer(directory, settings, ends_with_eos=kind == "encoder-decoder")
    if kind == "encoder-decoder":
        return SentencePieceTokenizer(directory, settings)
    return TransformersTokenizer(directory)


class FileTokenizer:
    """tokenizer.json, read by the `tokenizers` library.

    ends_with_eos: close every prompt with the end-of-sequence token, as T5 does.
    """

    def __init__(
        self, directory: Path, settings: dict[str, Any], *, ends_with_eos: bool = False
    ) -> None:
        from tokenizers import Tokenizer as Loaded

        self._directory = directory
        file = directory / "tokenizer.json"
        try:
            self._tokenizer = Loaded.from_file(str(file))
        except Exception as problem:  # the library raises plain Exception
            raise CheckpointError(
                f"{file} is damaged ({_first_line(problem)}): download it again"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokenizer.token_to_id(_token(settings.get("eos_token")) or "</s>")
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
        return _digest(self._directory)

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


class SentencePieceTokenizer:
    """spiece.model, read by sentencepiece, with T5's extra ids behind it.

    <extra_id_0> has the highest id of all, the next one the id before it.
    """

    has_chat_template = False

    def __init__(self, directory: Path, settings: dict[str, Any]) -> None:
        import sentencepiece

        self._directory = directory
        file = directory / "spiece.model"
        if not file.is_file():
            raise CheckpointError(f"{directory} has no tokenizer.json and no spiece.model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as problem:
            raise CheckpointError(
                f"{file} is damaged ({_first_line(problem)}): download it again"
            ) from None
        self._own = self._processor.get_piece_size()
        self._extra = int(settings.get("extra_ids", 100))
        eos = self._processor.eos_id()
        self._eos = () if eos < 0 else (eos,)
        controls = [id for id in range(self._own) if self._processor.is_control(id)]
        self._special = frozenset([*controls, *range(self._own, self.size)])

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos

    @property
    def special_ids(self) -> frozenset[int]:
        return self._special

    @property
    def size(self) -> int:
        return self._own + self._extra

    @property
    def digest(self) -> str:
        return _digest(self._directory)

    def encode(self, text: str) -> list[int]:
        return [*self._processor.encode(text), *self._eos]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self._special])

    def apply_chat(self, text: str) -> list[int]:
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        own: list[str | None] = [self._processor.id_to_piece(id) for id in range(self._own)]
        return own + [f"<extra_id_{index}>" for index in reversed(range(self._extra))]


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
        return _digest(self._directory)

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


def _from_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as problem:  # many kinds, depending on the file that is wrong
        raise CheckpointError(
            f"{directory} has no tokenizer that can be read ({_first_line(problem)})"
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
            f"the chat template cannot be applied ({_first_line(problem)}): use --no-chat-template"
        ) from None


def _settings(directory: Path) -> dict[str, Any]:
    file = directory / "tokenizer_config.json"
    if not file.is_file():
        return {}
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise CheckpointError(f"{file} is not a JSON object: download it again")
    return settings


def _digest(directory: Path) -> str:
    whole = hashlib.blake2b(digest_size=16)
    files = {file for pattern in FILES for file in directory.glob(pattern) if file.is_file()}
    for file in sorted(files):
        whole.update(file.name.encode() + b"\0")
        whole.update(hashlib.blake2b(file.read_bytes()).digest())
    return whole.hexdigest()


def _token(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _by_id(vocabulary: dict[str, int], size: int) -> list[str | None]:
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces


def _first_line(problem: Exception) -> str:
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0]
