"""Tokenizers that libraries read: `tokenizers`, sentencepiece for T5's spiece.model, or
transformers for what these cannot.

A tokenizer's files are made by strangers. A normalizer prepends and replaces what the file says, so
that a few steps can make gigabytes of a short prompt. `Growth` bounds that.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..checkpoints.disk import read_json
from ..errors import CheckpointError, first_line, is_panic
from . import chat
from .chat import Ending, Messages
from .tokenizer import Tokenizer

FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""
LONG = 1000
"""Tokens that are decoded as a batch of one, which lets other threads run meanwhile."""
GROWTH = 64
"""Letters that a file may make of one: Unicode's forms alone make 18."""
FREE, PART = 1 << 16, 4096
"""Letters that a text may gain whatever its length, and those that are normalized at a time."""
_UNICODE = 18
"""Letters that a Unicode form makes of one at most: U+FDFA under NFKD."""
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\n")
"""How tiktoken's files begin: a token in base 64, and its rank."""
EXTRA, MOST_EXTRA = 100, 100_000
"""T5's sentinels where nothing says how many there are, and the most that a file may have."""
_SENTINEL = re.compile(r"<extra_id_(\d{1,6})>", re.ASCII)
_NORMALIZERS, _CHARSMAP = (3, 5), 2
"""Fields of sentencepiece's ModelProto that hold normalizers, the second one the decoder's, and the
field of each that holds its character map."""


class Growth:
    """Refuses texts of which a tokenizer.json makes more than GROWTH letters for one.

    The library normalizes added tokens while it reads the file, so this comes first. Raises
    CheckpointError for a file that declares too much, or is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._file, declared = file, read_json(file)
        try:
            self._steps = list(_flat(declared.get("normalizer")))
            factors = [_factor(step) for step in self._steps]
            self._times = math.prod(map(_times, _flat(declared.get("post_processor"))))
            decoder = _flat(declared.get("decoder"))
            replaces = [_factor(step) for step in decoder if step["type"] == "Replace"]
            tokens = declared.get("added_tokens") or ()
            added = "".join(each["content"] for each in tokens if each.get("normalized", True))
        except (AttributeError, KeyError, TypeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {first_line(problem)}"
            raise CheckpointError(f"{file} is damaged ({reason:.100}): download it again") from None
        if max(self._times, math.prod(replaces), *factors) > GROWTH:
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


def _flat(value: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of tokenizer.json, sequences taken apart."""
    if isinstance(value, dict) and value.get("type") != "Sequence":
        yield value
    elif value is not None:
        parts = value if isinstance(value, list) else [v for v in value.values() if v != "Sequence"]
        for part in parts:
            yield from _flat(part)


def _factor(step: Mapping[str, Any]) -> int:
    """How many letters a step of a normalizer or decoder makes of one, at most."""
    if step["type"] == "Precompiled":
        return _longest(base64.b64decode(step["precompiled_charsmap"]))
    declared = step.get("content", step.get("prepend"))
    return _UNICODE if declared is None else 1 + len(declared)


def _times(step: Mapping[str, Any]) -> int:
    """How often a step of a post-processor repeats a text."""
    pieces = step["single"] if step["type"] == "TemplateProcessing" else ()
    return max(1, sum("Sequence" in piece for piece in pieces))


def _longest(charsmap: bytes) -> int:
    """Letters, or a few more, of the longest text that a precompiled charsmap writes for another.

    Format: the size of a trie (uint32, little endian), the trie, and texts that end with a zero.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


@contextlib.contextmanager
def _no_panic(directory: Path, where: str = " on this text") -> Iterator[None]:
    """Raise CheckpointError, of a tokenizer's directory, where the library panics. Rust has written
    to standard error by then."""
    try:
        yield
    except BaseException as problem:
        if not is_panic(problem):
            raise
        raise CheckpointError(
            f"the tokenizer of {directory} fails{where} ({first_line(problem):.100}): download its "
            "tokenizer.json again"
        ) from None


class DirectoryTokenizer(Tokenizer):
    """A tokenizer of a checkpoint's directory, whose chat template transformers applies.

    kind: transformers' name of the kind of model that it belongs to, None for what the files say.
    """

    def __init__(self, directory: Path, kind: str | None = None) -> None:
        self._directory, self._type = directory, kind

    @property
    def digest(self) -> str:
        whole = hashlib.blake2b(digest_size=16)
        found = {file for pattern in FILES for file in self._directory.glob(pattern)}
        for file in sorted(filter(Path.is_file, found)):
            whole.update(file.name.encode() + b"\0")
            whole.update(hashlib.blake2b(file.read_bytes()).digest())
        return whole.hexdigest()

    @functools.cached_property
    def templated(self) -> Any:
        """transformers' tokenizer, which has the chat template; reading it takes as long as many
        chats."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                self._directory,
                tokenizer_type=self._type,
                local_files_only=True,
                trust_remote_code=False,
            )
        except Exception as problem:  # many kinds, depending on the file that is wrong
            raise CheckpointError(
                f"{self._directory} has no tokenizer that can be read ({first_line(problem)})"
            ) from None

    def apply_chat(
        self,
        prompt: str | Messages,
        settings: Mapping[str, Any] | None = None,
        *,
        ending: Ending = "answer",
    ) -> list[int]:
        with _no_panic(self._directory):
            return chat.apply(self.templated, prompt, settings, ending=ending, check=self._check)

    def _check(self, text: str) -> None:
        """Raise CheckpointError for a text that may not be encoded."""


class FileTokenizer(DirectoryTokenizer):
    """A tokenizer of the `tokenizers` library.

    ends_with_eos: close every prompt with the end-of-sequence token, as T5 does.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, ends_with_eos: bool = False
    ) -> None:
        from tokenizers import Tokenizer as Loaded

        super().__init__(directory)
        file = directory / "tokenizer.json"
        self._check = Growth(file).check  # type: ignore[method-assign]
        try:
            with _no_panic(directory, " as it is read"):
                self._tokenizer = Loaded.from_str(file.read_text(encoding="utf-8"))
        except CheckpointError:
            raise
        except Exception as problem:  # the library raises plain Exception
            raise CheckpointError(
                f"{file} is damaged ({first_line(problem)}): download it again"
            ) from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        eos = settings.get("eos_token")
        eos = eos.get("content") if isinstance(eos, Mapping) else eos
        end = self._tokenizer.token_to_id(eos if eos and isinstance(eos, str) else "</s>")
        self.eos_token_ids = () if end is None else (end,)
        self._closing = self.eos_token_ids if ends_with_eos else ()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.size = max(vocabulary.values(), default=-1) + 1
        self.has_chat_template = "chat_template" in settings or any(
            directory.glob("chat_template*")
        )

    def encode(self, text: str) -> list[int]:
        with _no_panic(self._directory):
            self._check(text)
            # Unlike `encode`, this lets other threads run meanwhile.
            [encoding] = self._tokenizer.encode_batch_fast([text])
            ids: list[int] = encoding.ids
        return ids if ids and ids[-1:] == [*self._closing] else [*ids, *self._closing]

    def decode(self, ids: Sequence[int]) -> str:
        with _no_panic(self._directory):
            if len(ids) < LONG:
                return self._tokenizer.decode(list(ids), skip_special_tokens=True)
            return self._tokenizer.decode_batch([list(ids)], skip_special_tokens=True)[0]

    def pieces(self) -> list[str | None]:
        return _by_id(self._tokenizer.get_vocab(with_added_tokens=True), self.size)


class TransformersTokenizer(DirectoryTokenizer):
    """A tokenizer that only transformers can read, such as CodeT5's and ByT5's."""

    def __init__(self, directory: Path, kind: str | None = None) -> None:
        super().__init__(directory, kind)
        file = directory / "tokenizer.model"
        if file.is_file() and not _TIKTOKEN.match(file.read_bytes()):
            # Of a damaged one transformers says that tiktoken is missing.
            _read_sentence_piece(file)
        eos = self.templated.eos_token_id
        self.eos_token_ids = () if eos is None else (eos,)
        self.special_ids = frozenset(self.templated.all_special_ids)
        self.size = len(self.templated)
        self.has_chat_template = self.templated.chat_template is not None

    def encode(self, text: str) -> list[int]:
        with _no_panic(self._directory):
            return list(self.templated.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        with _no_panic(self._directory):
            return self.templated.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )

    def pieces(self) -> list[str | None]:
        return _by_id(self.templated.get_vocab(), self.size)


def _by_id(vocabulary: Mapping[str, int], size: int) -> list[str | None]:
    """The token of each id, as Tokenizer.pieces says."""
    pieces: list[str | None] = [None] * size
    for piece, id in vocabulary.items():
        if 0 <= id < size:
            pieces[id] = piece
    return pieces


class SentencePieceTokenizer(DirectoryTokenizer):
    """T5's and mT5's spiece.model, read by sentencepiece, with extra ids behind it.

    <extra_id_0> has the highest id of all, the next one the id before it.
    """

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        super().__init__(directory)
        self._processor = _read_sentence_piece(directory / "spiece.model")
        self._count: int = self._processor.get_piece_size()
        # Some of these pieces may be sentinels (mT5's).
        last = str(self._processor.id_to_piece(self._count - 1)) if self._count else ""
        extra = settings.get("extra_ids")
        extra = (0 if "<extra_id_" in last else EXTRA) if extra is None else extra
        if type(extra) is not int or not 0 <= extra <= MOST_EXTRA:
            raise CheckpointError(
                f"tokenizer_config.json has extra_ids {extra!r:.40}: need a whole number"
            )
        self._extra: int = extra
        self.size = self._count + self._extra
        eos = self._processor.eos_id()
        self.eos_token_ids = () if eos < 0 else (eos,)
        controls = [id for id in range(self._count) if self._processor.is_control(id)]
        self.special_ids = frozenset([*controls, *range(self._count, self.size)])

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        # Every second part is the number of a sentinel.
        parts = _SENTINEL.split(text)
        for place, part in enumerate(parts):
            if place % 2 == 0:
                # Spaces around sentinels belong to them.
                part = part if place == 0 else part.lstrip(" ")
                part = part if place == len(parts) - 1 else part.rstrip(" ")
                ids += self._processor.encode(part)
            elif int(part) < self._extra:
                ids.append(self.size - 1 - int(part))
            else:
                ids += self._processor.encode(f"<extra_id_{part}>")
        return [*ids, *self.eos_token_ids]

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([id for id in ids if id not in self.special_ids])

    def pieces(self) -> list[str | None]:
        sentinels = [f"<extra_id_{index}>" for index in reversed(range(self._extra))]
        return [*map(self._processor.id_to_piece, range(self._count)), *sentinels]


def _read_sentence_piece(file: Path) -> Any:
    """Read sentencepiece's own object. Raises CheckpointError for a damaged file, and for one that
    makes far more of a text than any tokenizer does."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        normalizers = [part for field, part in _fields(file.read_bytes()) if field in _NORMALIZERS]
        maps = [part for each in normalizers for field, part in _fields(each) if field == _CHARSMAP]
    except (RuntimeError, OSError) as problem:
        raise CheckpointError(
            f"{file} is damaged ({first_line(problem)}): download it again"
        ) from None
    if max(map(_longest, maps), default=1) > GROWTH:
        raise CheckpointError(
            f"{file} is refused: it writes more than {GROWTH} letters for a few; take the file of "
            "the model's makers"
        )
    return processor


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and content of the fields of a protobuf message; of numbers no content."""
    stream = io.BytesIO(message)

    def varint() -> int:
        value = shift = 0
        while byte := stream.read(1):
            value |= (byte[0] & 0x7F) << shift
            shift += 7
            if byte[0] < 0x80:
                break
        return value

    while stream.tell() < len(message):
        field, kind = divmod(varint(), 8)
        size = varint() if kind in (0, 2) else 8 if kind == 1 else 4
        yield field, stream.read(0 if kind == 0 else size)
