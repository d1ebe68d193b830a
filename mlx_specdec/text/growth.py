"""What a tokenizer's files may make of a text: a stranger's normalizer can make gigabytes of a
short prompt in a few steps."""

import base64
import functools
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.disk import read_json
from ..errors import CheckpointError, first_line

GROWTH = 64
"""Letters that a file may make of one: Unicode's forms alone make 18."""
FREE, PART = 1 << 16, 4096
"""Letters that a text may gain whatever its length, and those that are normalized at a time."""
_UNICODE = 18
"""Letters that a Unicode form makes of one at most: U+FDFA under NFKD."""
_NORMALIZERS, _CHARSMAP = (3, 5), 2
"""Fields of sentencepiece's ModelProto that hold normalizers, the second one the decoder's, and the
field of each that holds its character map."""


class Growth:
    """Refuses texts of which a tokenizer.json makes more than GROWTH letters for one. To be made
    before the library reads the file, since that normalizes added tokens. Raises CheckpointError
    for a file that declares too much, or is damaged."""

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
        from tokenizers import Tokenizer

        model = {"type": "BPE", "vocab": {}, "merges": []}
        alone = (json.dumps({"normalizer": step, "model": model}) for step in self._steps)
        return [Tokenizer.from_str(each).normalizer for each in alone]

    def _refusal(self, text: str) -> CheckpointError:
        far = f"it makes far more of {text} than is usual"
        return CheckpointError(f"{self._file} is refused: {far}")


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
    """About the letters of the longest text that a precompiled charsmap writes for another. It has
    the size of a trie (uint32, little endian), the trie, and texts that end with a zero."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(map(len, texts.split(b"\0")))


def read_sentence_piece(file: Path) -> Any:
    """Read a sentencepiece model. Raises CheckpointError for a damaged file, and for one that makes
    far more of a text than any tokenizer does."""
    import sentencepiece

    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
        normalizers = [part for field, part in _fields(file.read_bytes()) if field in _NORMALIZERS]
        maps = [part for each in normalizers for field, part in _fields(each) if field == _CHARSMAP]
    except (RuntimeError, OSError) as problem:
        raise CheckpointError(f"{file} is damaged: {first_line(problem)}") from None
    if max(map(_longest, maps), default=1) > GROWTH:
        raise CheckpointError(f"{file} is refused: it writes more than {GROWTH} letters for a few")
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
