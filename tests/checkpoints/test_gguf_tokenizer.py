"""Tokenizers rebuilt from GGUF metadata split any text as the originals do."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from mlx_specdec.checkpoints.formats.gguf_header import Metadata
from mlx_specdec.checkpoints.formats.vocabularies import RULES, tokenizer_files

ROOT = Path(__file__).parents[2]
LLAMA = {
    "model_type": "bpe",
    "byte_fallback": True,
    "normalization_rule_name": "identity",
    "split_digits": True,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
}
T5 = {"model_type": "unigram", "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-without-prefix": {**LLAMA, "add_dummy_prefix": False},
    "gemma": {**LLAMA, "add_dummy_prefix": False},
    "t5": T5,
    "t5-with-bytes": {**T5, "byte_fallback": True},
    "t5-with-spaces": {**T5, "remove_extra_whitespaces": False},
}
LETTERS = "abcdefghi XYZ  .,'\"\n\t0123456789éüœßﬁ½Ⅳａ日本語🙂–’"

PRINTED = st.characters(exclude_categories=("C",), exclude_characters="<")
"""Nothing that sentencepiece removes: of a text of nothing else it leaves a space. Nothing like
<unk> either, which is a token to us, as to transformers, and text to sentencepiece."""


@cache
def pair(kind: str) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """A vocabulary of this file, and the same rebuilt."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in lines if line.strip()]),
        model_writer=written,
        vocab_size=600,
        hard_vocab_limit=False,
        minloglevel=2,
        **KINDS[kind],
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return processor, Tokenizer.from_str(
        tokenizer_files(metadata(kind, processor))["tokenizer.json"]
    )


def metadata(kind: str, processor: sentencepiece.SentencePieceProcessor) -> Metadata:
    """What llama.cpp's converter would write of a vocabulary."""
    tests = ((2, "is_unknown"), (3, "is_control"), (6, "is_byte"))
    ids = range(processor.get_piece_size())
    types = [next((n for n, test in tests if getattr(processor, test)(id)), 1) for id in ids]
    architecture = kind.partition("-")[0]
    values: dict[str, Any] = {
        "model": "t5" if architecture == "t5" else "llama",
        "tokens": [processor.id_to_piece(id) for id in ids],
        "scores": np.array([processor.get_score(id) for id in ids], np.float32),
        "token_type": np.array(types, np.int32),
        "add_space_prefix": KINDS[kind].get("add_dummy_prefix", True),
        "remove_extra_whitespaces": KINDS[kind].get("remove_extra_whitespaces", True),
        "eos_token_id": processor.eos_id(),
    }
    if architecture == "t5":
        charsmap = processor.serialized_model_proto()
        values["precompiled_charsmap"] = np.frombuffer(_charsmap(charsmap), np.uint8)
    return Metadata(
        {"general.architecture": architecture}
        | {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    )


def _charsmap(model: bytes) -> bytes:
    """The largest field of the normaliser's part of a model, told by its tags and lengths."""
    place = model.rindex(b"\x0a\x08nmt_nfkc\x12") + len(b"\x0a\x08nmt_nfkc\x12")
    length = shift = 0
    while True:
        byte = model[place]
        length |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return model[place : place + length]


@pytest.mark.parametrize("kind", KINDS)
def test_code_is_split_the_same_line_by_line(kind: str) -> None:
    processor, rebuilt = pair(kind)
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        assert rebuilt.encode(line, add_special_tokens=False).ids == processor.encode(line)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.one_of(st.text(LETTERS, max_size=40), st.text(PRINTED, max_size=12)))
def test_any_text_is_split_the_same(kind: str, text: str) -> None:
    processor, rebuilt = pair(kind)
    assert rebuilt.encode(text, add_special_tokens=False).ids == processor.encode(text)


def test_rules_for_bytes_are_those_of_transformers_where_it_has_them() -> None:
    name = "transformers.integrations.gguf.gguf_tokenizer_mapping"
    theirs = pytest.importorskip(name, exc_type=ImportError).GGUF_PRE_TOKENIZER_SPLITS
    common = RULES.keys() & theirs.keys()
    assert len(common) > 15
    for name in common:
        assert RULES[name].split == theirs[name], name


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_gives_text_back(rule: str) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    said = {"model": "gpt2", "pre": rule, "tokens": letters}
    values = {f"tokenizer.ggml.{key}": value for key, value in said.items()}
    made = tokenizer_files(Metadata({"general.architecture": "llama", **values}))
    tokenizer = Tokenizer.from_str(made["tokenizer.json"])
    text = "Grüße! I'll say  12345 timesÄ\n\n日本 🙂 HTTPServer/x"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
