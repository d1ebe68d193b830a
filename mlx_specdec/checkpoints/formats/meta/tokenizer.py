"""Meta's tokenizer.model, SentencePiece's or tiktoken's -> the files that Hugging Face has."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...disk import reading
from ...tensors import Malformed, naming
from ..gguf import tokenizer as gguf_tokenizer
from ..gguf.header import Metadata

MODEL = "tokenizer.model"
LARGEST_FILE = 16_000_000
LONGEST = 256
"""Bytes of a token; cutting one in every way takes the square of its length."""
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
_ADVICE = "take the one that belongs to the model"
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
    with naming(file), reading(file):
        if file.stat().st_size > LARGEST_FILE:
            raise Malformed(f"is too large for a tokenizer: {_ADVICE}")
        data = file.read_bytes()
        if _LINE.fullmatch(data.split(b"\n", 1)[0].strip()):
            return _tiktoken(data, vocabulary, since_31=since_31)
        return _sentencepiece(data, vocabulary)


def _sentencepiece(data: bytes, vocabulary: int) -> Text:
    """By way of what llama.cpp has for such a vocabulary."""
    import sentencepiece
    from tokenizers import Tokenizer

    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(data)
        size = processor.get_piece_size()
        if size > vocabulary:
            raise Malformed(f"has {size} tokens where the model knows {vocabulary}: {_ADVICE}")
        metadata = Metadata(_described(processor))
        expected = {trial: processor.encode(trial) for trial in _TRIALS}
    # A damaged one loads at times: its tokens are no text then, or its own ids not among them.
    except (RuntimeError, OSError, ValueError, LookupError):
        raise Malformed(
            "is damaged, or neither SentencePiece's nor tiktoken's: download it again"
        ) from None
    made = gguf_tokenizer.build(metadata)
    tokenizer = Tokenizer.from_str(made or "")
    for text, ids in expected.items():
        if tokenizer.encode(text, add_special_tokens=False).ids != ids:
            raise Malformed(f"cuts text in a way that tokenizer.json cannot say: {_ADVICE}")
    ends = {"bos": processor.bos_id(), "eos": processor.eos_id()}
    known = {f"{name}_token_id": id for name, id in ends.items() if id >= 0}
    return _text(str(made), gguf_tokenizer.settings(metadata), known, size)


def _described(processor: Any) -> dict[str, Any]:
    """A SentencePiece vocabulary as the metadata of a GGUF file."""
    every = range(processor.get_piece_size())
    kinds = (processor.is_unknown, processor.is_control, processor.is_unused, processor.is_byte)
    types = np.ones(len(every), int)
    for kind, number in zip(kinds, (2, 3, 5, 6), strict=True):
        types[[id for id in every if kind(id)]] = number
    special = (("bos", "bos_id"), ("eos", "eos_id"), ("unknown", "unk_id"))
    ids = {f"{name}_token_id": getattr(processor, place)() for name, place in special}
    spaced = processor.encode("x  x", out_type=str)
    values = {
        "model": "llama",
        "tokens": [processor.id_to_piece(id) for id in every],
        "scores": np.array([processor.get_score(id) for id in every]),
        "token_type": types,
        "add_space_prefix": spaced[0].startswith("▁"),
        "remove_extra_whitespaces": "▁▁" not in "".join(spaced),
        **{name: id for name, id in ids.items() if id >= 0},
    }
    return {
        "general.architecture": "llama",
        **{f"tokenizer.ggml.{name}": value for name, value in values.items()},
    }


def _tiktoken(data: bytes, vocabulary: int, *, since_31: bool) -> Text:
    ranks = _ranks(data)
    count, named = len(ranks), _NAMED_31 if since_31 else _NAMED_3
    if vocabulary - count < _SPECIAL:
        raise Malformed(
            f"has {count} tokens and {_SPECIAL} special ones where the model knows {vocabulary}: "
            f"{_ADVICE}"
        )
    free = iter(range(_SPECIAL))
    special = [
        f"<|{named[place]}|>" if place in named else f"<|reserved_special_token_{next(free)}|>"
        for place in range(_SPECIAL)
    ]
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": special[0],
        "eos_token": special[1],
    }
    ends = [count + end for end in ([1, 8, 9] if since_31 else [1, 9])]
    ids = {"bos_token_id": count, "eos_token_id": ends}
    return _text(_tiktoken_json(ranks, special), names, ids, count + _SPECIAL)


def _ranks(data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for rank, line in enumerate(line for line in data.splitlines() if line.strip()):
        try:
            token = base64.b64decode(line.split()[0], validate=True)
        except binascii.Error:
            token = b""
        if not _LINE.fullmatch(line.strip()) or not token:
            raise Malformed(f"is damaged in its line {rank + 1}")
        said = int(line.split()[1][:20])
        if said != rank:
            raise Malformed(f"is damaged: its line {rank + 1} has the rank {said}")
        if ranks.setdefault(token, rank) != rank:
            raise Malformed(f"is damaged: {token!a:.60} is both token {ranks[token]} and {rank}")
        if len(token) > LONGEST:
            raise Malformed(f"is damaged: token {rank} has {len(token)} characters")
    if not {bytes([byte]) for byte in range(256)} <= ranks.keys():
        raise Malformed("is damaged: it lacks tokens of single bytes")
    return ranks


def _tiktoken_json(ranks: dict[bytes, int], special: list[str]) -> str:
    """The text of tokenizer.json. special: the tokens after `ranks`; the first begins a text."""
    # Where torch is absent it says so when it is imported; mlx-lm sets the same variable.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from tokenizers import processors
    from transformers.convert_slow_tokenizer import TikTokenConverter

    class Converter(TikTokenConverter):
        @staticmethod
        def load_tiktoken_bpe(tiktoken_url: str) -> dict[bytes, int]:
            return ranks  # its own way of reading needs tiktoken

    with gguf_tokenizer.library_errors():
        tokenizer = Converter(extra_special_tokens=special).converted()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[special[0], "$A"], special_tokens=[(special[0], len(ranks))]
        )
        return str(tokenizer.to_str(pretty=False))


def _text(made: str, settings: Mapping[str, Any], ids: Mapping[str, Any], size: int) -> Text:
    files = {
        "tokenizer.json": made,
        "tokenizer_config.json": json.dumps(settings, indent=2),
        "generation_config.json": json.dumps(ids, indent=2),
    }
    return Text(files, ids, size)
