"""Meta's tokenizer.model -> the files that Hugging Face has in its place.

Knows both kinds, SentencePiece's and tiktoken's. What is made is held to the original where a
library is at hand that reads it.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import CheckpointError
from ..malformed import Malformed
from .bpe import SPACE, Pieces, sentencepiece_json, tiktoken_json

MODEL = "tokenizer.model"
LARGEST_FILE = 16_000_000
_LINE = re.compile(rb"[A-Za-z0-9+/]+=* [0-9]+")
_SPECIAL = 256
_NAMED_3 = {
    0: "begin_of_text",
    1: "end_of_text",
    6: "start_header_id",
    7: "end_header_id",
    9: "eot_id",
}
_NAMED_31 = {**_NAMED_3, 4: "finetune_right_pad_id", 8: "eom_id", 10: "python_tag"}
"""Places among Llama 3's special tokens; the others are reserved."""
_TRIALS = (
    'Once upon a time, there was a little girl named Lily. She said: "I don\'t know!"',
    "  two  spaces\n\n\tand a tab, 3.14159 or 1234567890",
    "ünïcödé ﬁ 漢字 🙂",
    "def f(x):\n    return x",
)


@dataclass(frozen=True)
class Text:
    """files: name -> text, tokenizer.json among them. ids: entries of config.json and of
    generation_config.json. size: tokens, special ones included."""

    files: Mapping[str, str]
    ids: Mapping[str, Any]
    size: int


def read_tokenizer(file: Path, vocabulary: int, *, since_31: bool = False) -> Text:
    """vocabulary: ids that the model knows; there may be fewer tokens, not more. since_31: names
    Llama 3.1's special tokens instead of 3's. Raises CheckpointError."""
    try:
        return _read(file, vocabulary, since_31=since_31)
    except OSError as problem:
        raise CheckpointError(f"{file} cannot be read: {problem.strerror}") from problem
    except Malformed as problem:
        raise CheckpointError(f"{file} {problem}: take the one that belongs to the model") from None


def _read(file: Path, vocabulary: int, *, since_31: bool) -> Text:
    if file.stat().st_size > LARGEST_FILE:
        raise Malformed("is too large for a tokenizer")
    data = file.read_bytes()
    if _LINE.fullmatch(data.split(b"\n", 1)[0].strip()):
        text = _tiktoken(data, vocabulary, since_31=since_31)
    else:
        text = _sentencepiece(data, vocabulary)
    if text.size > vocabulary:
        raise Malformed(f"has {text.size} tokens where the model knows {vocabulary}")
    return text


def _sentencepiece(data: bytes, vocabulary: int) -> Text:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
        size = processor.get_piece_size()
        if size > vocabulary:
            raise Malformed(f"has {size} tokens where the model knows {vocabulary}")
        pieces = _pieces(processor, size)
        expected = {trial: processor.encode(trial) for trial in _TRIALS}
    # A damaged one loads at times: its tokens are no text then, or its own ids not among them.
    except (RuntimeError, OSError, ValueError, LookupError):
        raise Malformed("is damaged, or neither SentencePiece's nor tiktoken's") from None
    made = sentencepiece_json(pieces)
    _hold(made, expected)
    names = {"bos": processor.bos_id(), "eos": processor.eos_id(), "unk": processor.unk_id()}
    ids = {name: id for name, id in names.items() if id >= 0}
    return _text(made, pieces.tokens, ids, size)


def _pieces(processor: Any, size: int) -> Pieces:
    controls = [id for id in range(size) if processor.is_control(id)]
    byte_ids = {id for id in range(size) if processor.is_byte(id)}
    unknown = processor.unk_id()
    others = {*controls, *byte_ids, unknown}
    return Pieces(
        tokens=[processor.id_to_piece(id) for id in range(size)],
        scores=[processor.get_score(id) for id in range(size)],
        controls=[*controls, unknown],
        plain=[id for id in range(size) if id not in others and not processor.is_unused(id)],
        unknown=unknown,
        begin=processor.bos_id() if processor.bos_id() >= 0 else None,
        leads=processor.encode("x", out_type=str)[0].startswith(SPACE),
        collapses=SPACE * 2 not in "".join(processor.encode("x  x", out_type=str)),
        has_bytes=bool(byte_ids),
    )


def _hold(made: str, expected: Mapping[str, list[int]]) -> None:
    """Raises Malformed where tokenizer.json cuts a text otherwise than the original does."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(made)
    for text, ids in expected.items():
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            raise Malformed("cuts text in a way that tokenizer.json cannot say")


def _tiktoken(data: bytes, vocabulary: int, *, since_31: bool) -> Text:
    tokens: list[bytes] = []
    for line in data.splitlines():
        if not line.strip():
            continue
        if not _LINE.fullmatch(line.strip()):
            raise Malformed(f"is damaged in its line {len(tokens) + 1}")
        token, rank = line.split()
        try:
            tokens.append(base64.b64decode(token, validate=True))
        except binascii.Error:
            raise Malformed(f"is damaged in its line {len(tokens) + 1}") from None
        if int(rank[:20]) != len(tokens) - 1:
            raise Malformed(f"is damaged: its line {len(tokens)} has the rank {int(rank[:20])}")
    if not {bytes([byte]) for byte in range(256)} <= {*tokens}:
        raise Malformed("is damaged: it lacks tokens of single bytes")
    named = _NAMED_31 if since_31 else _NAMED_3
    if vocabulary - len(tokens) < _SPECIAL:
        raise Malformed(
            f"has {len(tokens)} tokens and {_SPECIAL} special ones where the model knows "
            f"{vocabulary}"
        )
    free = iter(range(_SPECIAL))
    special = [
        f"<|{named[place]}|>" if place in named else f"<|reserved_special_token_{next(free)}|>"
        for place in range(_SPECIAL)
    ]
    made = tiktoken_json(tokens, special)
    ends = [1, 8, 9] if since_31 else [1, 9]
    ids = {"bos": len(tokens), "eos": len(tokens) + 1}
    names: dict[int, str] = {len(tokens) + place: token for place, token in enumerate(special)}
    return _text(made, names, ids, len(tokens) + _SPECIAL, [len(tokens) + end for end in ends])


def _text(
    made: str,
    tokens: Any,
    ids: Mapping[str, int],
    size: int,
    ends: list[int] | None = None,
) -> Text:
    """ends: ids that end a text, where there are several."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{name}_token": tokens[id] for name, id in ids.items()},
    }
    known: dict[str, Any] = {f"{n}_token_id": ids[n] for n in ("bos", "eos") if n in ids}
    if ends:
        known["eos_token_id"] = ends
    files = {
        "tokenizer.json": made,
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "generation_config.json": json.dumps(known, indent=2),
    }
    return Text(files, known, size)
