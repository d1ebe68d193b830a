"""What tokenizers share: their files, the letters of bytes, and a panic caught."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..checkpoints.disk import read_json as read_object
from ..errors import CheckpointError, first_line, is_panic

FILES = ("*token*", "spiece*", "vocab*", "merges*")
"""What a tokenizer may consist of."""
GROWTH, FREE = 64, 1 << 16
"""A text of n letters may become GROWTH * n + FREE: Unicode's forms alone make 18 of one."""
MOST_EXTRA = 100_000
"""Sentinels that are believed."""


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, {} where there is no file."""
    return read_object(file) if file.is_file() else {}


def digest_of(directory: Path) -> str:
    """Of all that a tokenizer may consist of."""
    whole = hashlib.blake2b(digest_size=16)
    files = {file for pattern in FILES for file in directory.glob(pattern) if file.is_file()}
    for file in sorted(files):
        whole.update(file.name.encode() + b"\0")
        whole.update(hashlib.blake2b(file.read_bytes()).digest())
    return whole.hexdigest()


def content_of(token: Any) -> str | None:
    """A special token's text, given as text or as an object; None for anything else."""
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None


def extra_ids(settings: Mapping[str, Any], default: int) -> int:
    """How many sentinels there are, <extra_id_0> and on. Raises CheckpointError for no number."""
    count = settings.get("extra_ids")
    count = default if count is None else count
    if type(count) is not int or not 0 <= count <= MOST_EXTRA:
        raise CheckpointError(f"tokenizer_config.json has extra_ids {count!r}: need a whole number")
    return count


def ids_of_added(where: object, decoder: Any, added: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the tokens that were added to a vocabulary.

    decoder: added_tokens_decoder of tokenizer_config.json, id -> token. added: added_tokens.json,
    token -> id, which is believed first. Raises CheckpointError, of `where`, for what is no id.
    """
    told = decoder.items() if isinstance(decoder, Mapping) else ()
    try:
        ids = {text: int(id) for id, token in told if (text := content_of(token))}
        return ids | {token: int(id) for token, id in added.items()}
    except (TypeError, ValueError, OverflowError):
        raise CheckpointError(
            f"{where} has an added token whose id is no number: download its tokenizer again"
        ) from None


@contextlib.contextmanager
def no_panic(directory: Path, where: str = " on this text") -> Iterator[None]:
    """Raises CheckpointError, of a tokenizer's directory, where the library panics.

    Rust has told standard error of it by then; to keep that from there would take the whole
    process's standard error away from everybody else.
    """
    try:
        yield
    except BaseException as problem:
        if not is_panic(problem):
            raise
        raise CheckpointError(
            f"the tokenizer of {directory} fails{where} ({first_line(problem):.100}): download its "
            "tokenizer.json again"
        ) from None


def _letters() -> list[str]:
    # Printable bytes are themselves, the others U+0100 and on, in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


LETTERS = _letters()
"""The letter in which byte-level BPE (GPT-2's, RoBERTa's) writes each byte."""
BYTES = {letter: byte for byte, letter in enumerate(LETTERS)}


LARGEST = 1 << 22
"""Letters that a text may become where it has not half as many itself."""


MOST_STEPS = 1000


_PART = 4096
"""Letters of a text whose growth is measured at a time."""


_UNICODE = 18
"""Letters that a Unicode form makes of one at most: U+FDFA under NFKD."""


_FACTORS = {"Lowercase": 2, "Nmt": 1, "Strip": 1, "StripAccents": 1}
"""Of steps that declare no text; those left out are some Unicode form, or do less."""


_NO_MODEL = {"type": "BPE", "vocab": {}, "merges": []}


_ESCAPED = re.compile(r"\\u00(4[1-9a-f]|5[0-9af]|6[1-9a-f]|7[0-9a])", re.IGNORECASE)
"""Letters that nobody has to escape, but that hide a name so."""


class _Step(NamedTuple):
    """One step of a normalizer: n letters become factor * n + added at most."""

    told: dict[str, Any]
    factor: float
    added: int

    def most(self, letters: float) -> float:
        return self.factor * letters + self.added


class Growth:
    """Of the tokenizer that a tokenizer.json declares.

    text: the file's. Raises CheckpointError for one that is damaged, or makes far more of a text
    than any tokenizer does.
    """

    def __init__(self, file: Path, text: str) -> None:
        self._file = file
        plain = _ESCAPED.sub(lambda letter: chr(int(letter[1], 16)), text)
        try:
            self._steps = [_normalizer(step) for step in _steps(plain, "normalizer", "normalizers")]
            self._times = _product(map(_times, _steps(plain, "post_processor", "processors")))
            decoded = _product(map(_decoded, _steps(plain, "decoder", "decoders")))
            _steps(plain, "pre_tokenizer", "pretokenizers")
            added = "".join(
                token["content"]
                for token in _told(plain, "added_tokens") or ()
                if token.get("normalized", True)
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as problem:
            reason = f"{type(problem).__name__}: {first_line(problem)}"
            raise CheckpointError(f"{file} is damaged ({reason:.100}): download it again") from None
        if decoded > GROWTH:
            raise self._refusal("a few tokens")
        self.check(added)

    def check(self, text: str) -> None:
        """Raises CheckpointError for a text of which the tokenizer would make far more."""
        letters = len(text)
        allowed = min(GROWTH * letters + FREE, max(2 * letters, LARGEST))
        worst = float(letters)
        for step in self._steps:
            worst = step.most(worst)
        if worst * self._times > allowed and self._measured(text) * self._times > allowed:
            raise self._refusal(f"a text of {letters:,} letters")

    def _measured(self, text: str) -> float:
        """Letters that a text becomes; infinite where a step may write too many at once."""
        made = 0
        for begin in range(0, len(text), _PART):
            part = text[begin : begin + _PART]
            for step, normalizer in zip(self._steps, self._normalizers, strict=True):
                if step.most(len(part)) > LARGEST:
                    return math.inf
                part = normalizer.normalize_str(part)
            made += len(part)
        return made

    @cached_property
    def _normalizers(self) -> list[Any]:
        """The library's own object for each step."""
        from tokenizers import Tokenizer

        alone = ({"normalizer": step.told, "model": _NO_MODEL} for step in self._steps)
        return [Tokenizer.from_str(json.dumps(told)).normalizer for told in alone]

    def _refusal(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self._file} is refused: it makes far more of {text} than any tokenizer does; take "
            "the tokenizer.json of the model's makers"
        )


def longest(charsmap: bytes) -> int:
    """Letters, or a few more, of the longest text that a precompiled charsmap writes for another.

    Format: the size of a trie (uint32, little endian), the trie, and texts that end with a zero.
    """
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def _told(text: str, name: str) -> Any:
    """The object or list that a JSON text has under a name, wherever that is; None without one.

    The rest is not parsed: it is mostly a vocabulary, whose tokens have numbers. Raises ValueError.
    """
    told = (
        json.JSONDecoder().raw_decode(text, key.end())[0]
        for key in re.finditer(rf'"{name}"\s*:\s*', text)
    )
    values = [value for value in told if isinstance(value, dict | list)]
    if len(values) > 1:
        raise ValueError(f"it has {name} twice")
    return values[0] if values else None


def _steps(text: str, name: str, parts: str) -> list[dict[str, Any]]:
    """The steps under a name, sequences taken apart. parts: under which name they have theirs.

    Raises ValueError for more than MOST_STEPS, which would take long for a word.
    """
    told = _told(text, name)
    waiting, steps = [] if told is None else [told], []
    while waiting:
        step = waiting.pop()
        if step["type"] == "Sequence":
            waiting += reversed(step[parts])
        else:
            steps.append(step)
        if len(steps) + len(waiting) > MOST_STEPS:
            raise ValueError(f"{name} has more than {MOST_STEPS} steps")
    return steps


def _normalizer(told: dict[str, Any]) -> _Step:
    kind = told["type"]
    if kind == "Prepend":
        # Before each part of a text between special tokens, which may be every letter.
        added = len(told["prepend"])
        return _Step(told, 1 + added, added)
    if kind == "Precompiled":
        return _Step(told, max(1, longest(base64.b64decode(told["precompiled_charsmap"]))), 0)
    if kind == "Replace":
        return _Step(told, *_replaced(told))
    return _Step(told, _FACTORS.get(kind, _UNICODE), 0)


def _replaced(told: dict[str, Any]) -> tuple[float, int]:
    """The factor and what is added. An expression may match nothing, before every letter."""
    content, literal = len(told["content"]), told["pattern"].get("String", "")
    return (max(1, content / len(literal)), 0) if literal else (1 + content, content)


def _decoded(told: dict[str, Any]) -> float:
    """How many times as long as its tokens a step of a decoder makes a text."""
    return _replaced(told)[0] if told["type"] == "Replace" else 1


def _product(factors: Iterable[float]) -> float:
    """1 at least: what repeats a text not at all has been given it."""
    return max(1.0, math.prod(factors, start=1.0))


def _times(told: dict[str, Any]) -> int:
    """How often a text is repeated in what a post-processor makes of it."""
    is_template = told["type"] == "TemplateProcessing"
    return sum("Sequence" in piece for piece in told["single"]) if is_template else 1
