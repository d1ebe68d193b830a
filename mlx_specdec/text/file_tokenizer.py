"""Tokenizers that Hugging Face's libraries read: `tokenizers`, or transformers for what it cannot.

A tokenizer.json is made by strangers. Its normalizer prepends and replaces what the file says, so
that a few steps can make gigabytes of a short prompt. `Growth` bounds that.
"""

from __future__ import annotations

import base64
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints import files
from ..errors import CheckpointError, first_line
from . import chat
from .chat import Ending, Messages
from .tokenizer_files import (
    GROWTH,
    DirectoryTokenizer,
    content_of,
    longest,
    no_panic,
    read_sentence_piece,
)

LONG = 1000
"""Tokens that are decoded as a batch of one, which lets other threads run meanwhile."""
FREE, PART = 1 << 16, 4096
"""Letters that a text may gain whatever its length, and those that are normalized at a time."""
_UNICODE = 18
"""Letters that a Unicode form makes of one at most: U+FDFA under NFKD."""
_ESCAPED = re.compile(r"\\u00(4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a])", re.IGNORECASE)
"""Letters that nobody has to escape, and that would hide a name."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""How tiktoken's files begin: a token in base 64, and its rank."""


class Growth:
    """Refuses texts of which a tokenizer.json makes more than GROWTH letters for one.

    text: the file's content. The library normalizes added tokens while it reads the file, so this
    comes first. Raises CheckpointError for a file that declares too much, or is damaged.
    """

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        try:
            self._steps = _declared(text, "normalizer")
            factors = [_factor(step) for step in self._steps]
            self._times = math.prod(map(_times, _declared(text, "post_processor")))
            decoders = [step for step in _declared(text, "decoder") if step["type"] == "Replace"]
            tokens = _declared(text, "added_tokens")
            added = "".join(each["content"] for each in tokens if each.get("normalized", True))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {first_line(problem)}"
            raise CheckpointError(f"{file} is damaged ({reason:.100}): download it again") from None
        if max(self._times, math.prod(map(_factor, decoders)), *factors, 0) > GROWTH:
            raise self._refusal("a few letters")
        self._factor = math.prod(factors) * self._times
        self.check(added)

    def check(self, text: str) -> None:
        """Raise CheckpointError for a text that would grow too much."""
        if self._factor * len(text) <= GROWTH * len(text) + FREE:
            return
        for begin in range(0, len(text), PART):
            part = text[begin : begin + PART]
            most = GROWTH * len(part) + FREE
            for normalizer in self._normalizers:
                part = normalizer.normalize_str(part)
                if len(part) * self._times > most:
                    raise self._refusal(f"a text of {len(text):,} letters")

    @functools.cached_property
    def _normalizers(self) -> list[Any]:
        """The library's object for each step of the normalizer."""
        from tokenizers import Tokenizer

        model = {"type": "BPE", "vocab": {}, "merges": []}
        alone = (json.dumps({"normalizer": step, "model": model}) for step in self._steps)
        return [Tokenizer.from_str(each).normalizer for each in alone]

    def _refusal(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file} is refused: it makes far more of {text} than any tokenizer does; take "
            "the tokenizer.json of the model's makers"
        )


def _declared(text: str, name: str) -> list[dict[str, Any]]:
    """The objects under a name of a tokenizer.json, sequences taken apart. The rest of the file,
    mostly a vocabulary, is not parsed. Raises ValueError."""
    keys = re.finditer(rf'"{name}"\s*:\s*', text)
    values = [json.JSONDecoder().raw_decode(text, key.end())[0] for key in keys]
    found = [value for value in values if isinstance(value, dict | list)]
    if len(found) > 1 or _ESCAPED.search(text):
        raise ValueError(f"it may have {name} twice")
    return list(_flat(found))


def _flat(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict) and value.get("type") != "Sequence":
        yield value
        return
    parts = value if isinstance(value, list) else [v for v in value.values() if v != "Sequence"]
    for part in parts:
        yield from _flat(part)


def _factor(step: Mapping[str, Any]) -> int:
    """How many letters a step of a normalizer or decoder makes of one, at most."""
    if step["type"] == "Precompiled":
        return longest(base64.b64decode(step["precompiled_charsmap"]))
    declared = step.get("content", step.get("prepend"))
    return _UNICODE if declared is None else 1 + len(declared)


def _times(step: Mapping[str, Any]) -> int:
    """How often a step of a post-processor repeats a text."""
    pieces = step["single"] if step["type"] == "TemplateProcessing" else ()
    return max(1, sum("Sequence" in piece for piece in pieces))


class TemplatedTokenizer(DirectoryTokenizer):
    """A tokenizer whose chat template transformers applies."""

    @functools.cached_property
    def templated(self) -> Any:
        """transformers' tokenizer, which has the chat template; reading it takes as long as many
        chats."""
        return _from_transformers(self._directory)

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        with no_panic(self._directory):
            return chat.apply(self.templated, prompt, settings, ending=ending, check=self._check)

    def _check(self, text: str) -> None:
        """Raise CheckpointError for a text that may not be encoded."""


class FileTokenizer(TemplatedTokenizer):
    """A tokenizer of the `tokenizers` library.

    made: the library's object, where other files than tokenizer.json say what it is.
    ends_with_eos: close every prompt with the end-of-sequence token, as T5 does.
    """

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, Any],
        *,
        ends_with_eos: bool = False,
        made: Any = None,
    ) -> None:
        super().__init__(directory)
        self._growth: Growth | None = None
        if made is None:
            made, self._growth = _from_file(directory / "tokenizer.json")
        self._tokenizer = made
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = self._tokenizer.token_to_id(content_of(settings.get("eos_token")) or "</s>")
        self.eos_token_ids = () if eos is None else (eos,)
        self._closing = self.eos_token_ids if ends_with_eos else ()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.has_chat_template = "chat_template" in settings or any(
            directory.glob("chat_template*")
        )

    def encode(self, text: str) -> list[int]:
        with no_panic(self._directory):
            self._check(text)
            # Unlike `encode`, this lets other threads run meanwhile.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            ids: list[int] = encoding.ids
        return ids if ids and ids[-1:] == [*self._closing] else [*ids, *self._closing]

    def decode(self, ids: Sequence[int]) -> str:
        with no_panic(self._directory):
            if len(ids) < LONG:
                return self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(with_added_tokens=True), self.size)

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


class TransformersTokenizer(TemplatedTokenizer):
    """A tokenizer that only transformers can read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        file = directory / "tokenizer.model"
        if file.is_file() and not _TIKTOKEN.match(file.read_bytes()):
            # Of a damaged one transformers says that tiktoken is missing.
            read_sentence_piece(file)
        eos = self.templated.eos_token_id
        self.eos_token_ids = () if eos is None else (eos,)
        self.special_ids = frozenset(self.templated.all_special_ids)
        self.size = len(self.templated)
        self.has_chat_template = self.templated.chat_template is not None

    def encode(self, text: str) -> list[int]:
        with no_panic(self._directory):
            return list(self.templated.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        with no_panic(self._directory):
            return self.templated.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    def pieces(self) -> list[str | None]:
        return _by_id(self.templated.get_vocab(), self.size)


def _from_transformers(directory: Path) -> Any:
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


def _by_id(vocabulary: Mapping[str, int], size: int) -> list[str | None]:
    """The token of each id, as Tokenizer.pieces says."""
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces
