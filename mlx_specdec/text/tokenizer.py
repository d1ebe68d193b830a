"""Text <-> token ids, from a checkpoint's own files.

Encoder-decoder checkpoints never import
transformers; a decoder-only one does for a chat template, or where it has no tokenizer.json.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from ..checkpoints import files
from ..checkpoints.disk.reading import check_regular
from ..errors import CheckpointError, PromptError, first_line
from . import byte_level_bpe, chat, sentence_piece
from .chat import Messages
from .growth import Growth
from .sentence_piece import SentencePieceTokenizer
from .tokenizer_files import content_of, digest_of, no_panic, read_json

Kind = Literal["encoder-decoder", "decoder-only"]
NO_PROMPT = 'a prompt is text, token ids, or messages, each {"role": ..., "content": ...}'
HALF_A_CHARACTER = re.compile("[\ud800-\udfff]")
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""How tiktoken's files begin: a token in base 64, and its rank."""


class Tokenizer(Protocol):
    """What the rest of the program needs of a tokenizer."""

    def __hash__(self) -> int:
        """By identity: what was made from it is kept beside it."""
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
        self, prompt: str | Messages, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of messages, or of a text as the user's only one, up to where the answer begins.

        settings: more variables of the template."""
        ...

    def pieces(self) -> list[str | None]:
        """The token of each id, None where an id has none; as long as `size`."""
        ...


def load_tokenizer(directory: Path, *, kind: Kind) -> Tokenizer:
    """The tokenizer of a checkpoint directory.

    Raises CheckpointError where its files are missing or damaged, or know no text.
    """
    for name in ("tokenizer.json", "spiece.model", "tokenizer.model"):
        check_regular(directory / name)
    settings = read_json(directory / "tokenizer_config.json")
    tokenizer: Tokenizer
    if (directory / "tokenizer.json").is_file():
        tokenizer = FileTokenizer(directory, settings, ends_with_eos=kind == "encoder-decoder")
    elif kind == "encoder-decoder":
        tokenizer = _of_encoder_decoder(directory, settings)
    else:
        tokenizer = TransformersTokenizer(directory)
    # transformers makes an empty one of the class's name alone.
    if tokenizer.size <= len(tokenizer.special_ids):
        raise CheckpointError(
            f"{directory} has no tokenizer that knows any text: download its tokenizer.json"
        )
    return tokenizer


def prompt_ids(
    tokenizer: Tokenizer,
    prompt: str | Sequence[int] | Messages,
    *,
    chat_template: bool,
    system_prompt: str | None = None,
    chat_settings: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a prompt: text, messages of a chat, or ids, which stay as they are.

    chat_template: text is the user's message where there is a template; messages need one.
    system_prompt: the message before them. chat_settings: for the template. Raises PromptError for
    what is empty or neither of these, and for a system prompt or settings without a template.
    """
    if isinstance(prompt, bytes):
        raise PromptError("the prompt is bytes: decode them, a prompt is text")
    if not hasattr(prompt, "__len__"):
        raise PromptError(NO_PROMPT)
    if not (prompt.strip() if isinstance(prompt, str) else len(prompt)):
        raise PromptError("the prompt is empty: give some text")
    for text in (prompt, system_prompt):
        if isinstance(text, str) and HALF_A_CHARACTER.search(text):
            raise PromptError("a prompt has half a character in it, a lone surrogate: leave it out")
    messages = _messages(prompt) if chat_template or not isinstance(prompt, str) else None
    if messages is not None and tokenizer.has_chat_template:
        if system_prompt is not None:
            messages = [{"role": "system", "content": system_prompt}, *messages]
        return tokenizer.apply_chat(messages, chat_settings)
    if system_prompt is not None or chat_settings:
        raise PromptError(
            "a system prompt and settings of a chat template need one, and "
            + ("this model has none" if messages else "token ids take none")
            + ": leave them out"
        )
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    if messages is not None:
        raise PromptError("this model has no chat template: give the prompt as text")
    try:
        return [operator.index(cast(int, each)) for each in prompt]
    except TypeError:
        raise PromptError(NO_PROMPT) from None


def _messages(prompt: str | Sequence[int] | Messages) -> Messages | None:
    """A text as the user's only message, messages as they are, None for anything else."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    if all(isinstance(each, Mapping) and each.keys() >= {"role", "content"} for each in prompt):
        return cast(Messages, prompt)
    return None


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
            ids: list[int] = self._tokenizer.encode(text).ids
        return ids if ids and ids[-1:] == [*self._closing] else [*ids, *self._closing]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def apply_chat(
        self, prompt: str | Messages, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        with no_panic(self._directory):
            return chat.apply(self.templated, prompt, settings, check=self._check)

    @functools.cached_property
    def templated(self) -> Any:
        """transformers' tokenizer, which has the chat template; reading it takes as long as many
        chats."""
        return _from_transformers(self._directory)

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(with_added_tokens=True), self.size)

    def _check(self, text: str) -> None:
        if self._growth is not None:
            self._growth.check(text)


class TransformersTokenizer:
    """What only transformers can read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        file = directory / "tokenizer.model"
        if file.is_file() and not _TIKTOKEN.match(file.read_bytes()):
            # Of a damaged one transformers says that tiktoken is missing.
            sentence_piece.read(file)
        self._tokenizer = _from_transformers(directory)
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
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def apply_chat(
        self, prompt: str | Messages, settings: Mapping[str, Any] | None = None
    ) -> list[int]:
        with no_panic(self._directory):
            return chat.apply(self._tokenizer, prompt, settings)

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(), self.size)


def _of_encoder_decoder(directory: Path, settings: dict[str, Any]) -> Tokenizer:
    """The tokenizer of a T5 without tokenizer.json."""
    named = settings.get("tokenizer_class") or read_json(directory / "config.json").get(
        "tokenizer_class"
    )
    if named != byte_level_bpe.BYTES_ALONE and (directory / "spiece.model").is_file():
        return SentencePieceTokenizer(directory, settings)
    settings = read_json(directory / "special_tokens_map.json") | settings
    added = read_json(directory / "added_tokens.json")
    made, closes = byte_level_bpe.read(directory, named, settings, added)
    return FileTokenizer(directory, settings, ends_with_eos=closes, made=made)


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


def _from_transformers(directory: Path) -> Any:
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


def _by_id(vocabulary: dict[str, int], size: int) -> list[str | None]:
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces
