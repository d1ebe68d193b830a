"""Text <-> token ids, from a checkpoint's own files.

Knows tokenizer files. Knows nothing of models. Encoder-decoder checkpoints never import
transformers; a decoder-only one does for a chat template, or where it has no tokenizer.json.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from ..errors import CheckpointError
from . import byte_level_bpe
from .byte_tokenizer import ByteTokenizer

Kind = Literal["encoder-decoder", "decoder-only"]
FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""
EXTRA, MOST_EXTRA = 100, 100_000
"""T5's sentinels, where nothing says how many there are, and the most that are believed."""
_SENTINEL = re.compile(r" *<extra_id_(\d{1,6})> *", re.ASCII)


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
    settings = _json(directory / "tokenizer_config.json")
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
            raise CheckpointError(f"{directory} has no spiece.model")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as problem:
            raise CheckpointError(
                f"{file} is damaged ({_first_line(problem)}): download it again"
            ) from None
        self._own = self._processor.get_piece_size()
        self._extra = self._extra_ids(file, settings)
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
        ids: list[int] = []
        # Every second part is the number of a sentinel; spaces around sentinels belong to them.
        for place, part in enumerate(_SENTINEL.split(text)):
            if place % 2 == 0:
                ids += self._processor.encode(part)
            elif int(part) < self._extra:
                ids.append(self.size - 1 - int(part))
            else:
                ids += self._processor.encode(f"<extra_id_{part}>")
        return [*ids, *self._eos]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self._special])

    def apply_chat(self, text: str) -> list[int]:
        raise CheckpointError("this model has no chat template")

    def pieces(self) -> list[str | None]:
        own: list[str | None] = [self._processor.id_to_piece(id) for id in range(self._own)]
        return own + [f"<extra_id_{index}>" for index in reversed(range(self._extra))]

    def _extra_ids(self, file: Path, settings: dict[str, Any]) -> int:
        """How many there are behind the model's own pieces, some of which may be them (mT5's)."""
        count = settings.get("extra_ids")
        if count is None:
            last = str(self._processor.id_to_piece(self._own - 1)) if self._own else ""
            return 0 if "<extra_id_" in last else EXTRA
        if type(count) is not int or not 0 <= count <= MOST_EXTRA:
            raise CheckpointError(
                f"{file.with_name('tokenizer_config.json')} has extra_ids {count!r}: need a whole "
                "number, mostly 100"
            )
        return count


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


def _of_encoder_decoder(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a T5 without tokenizer.json."""
    named = settings.get("tokenizer_class") or _json(directory / "config.json").get(
        "tokenizer_class"
    )
    if named == "ByT5Tokenizer":
        return ByteTokenizer(settings, _json(directory / "added_tokens.json"))
    if (directory / "spiece.model").is_file():
        return SentencePieceTokenizer(directory, settings)
    if not byte_level_bpe.is_here(directory):
        raise CheckpointError(
            f"{directory} has no tokenizer.json, no spiece.model, and no vocab.json with merges.txt"
        )
    settings = _json(directory / "special_tokens_map.json") | settings
    added = _json(directory / "added_tokens.json")
    read = byte_level_bpe.read(directory, named, settings, added)
    return FileTokenizer(directory, settings, ends_with_eos=read.closes, made=read.tokenizer)


def _from_file(file: Path) -> Any:
    from tokenizers import Tokenizer as Loaded

    try:
        return Loaded.from_file(str(file))
    except Exception as problem:  # the library raises plain Exception
        raise CheckpointError(
            f"{file} is damaged ({_first_line(problem)}): download it again"
        ) from None


def _from_transformers(directory: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True)
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


def _json(file: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no file."""
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
