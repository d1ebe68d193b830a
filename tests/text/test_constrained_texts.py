"""Texts bound by a grammar, in the tokens of every kind of tokenizer: what is printed fits."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest

from mlx_specdec.engine.pair import alphabet_of
from mlx_specdec.text.tokenizer import Kind, load_tokenizer

from ..support.letters import regex
from ..support.tokenizers import byte_level, sentence_piece, unigram

TOKENIZERS = {
    "byte-level": (byte_level, "decoder-only"),
    "unigram": (unigram, "encoder-decoder"),
    "unigram of a decoder": (unigram, "decoder-only"),
    "sentencepiece": (sentence_piece, "encoder-decoder"),
}
PATTERNS = [
    "(Les|des) [a-z]{3,5}( midi)?",
    " {0,3}pas",
    '\\{"a": [0-9]{2}, "é": "[^"\\\\]{1,4}"\\}',
    "日本語?[🙂🙃é]{2}",
    "<unk>|</s>x|<0x41>",
    "(?s:.){1,6}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_printed_fits_the_pattern(name: str, pattern: str, tmp_path: Path) -> None:
    make, kind = TOKENIZERS[name]
    kinds: dict[str, Kind] = {"encoder-decoder": "encoder-decoder", "decoder-only": "decoder-only"}
    tokenizer = load_tokenizer(make(tmp_path), kind=kinds[kind])
    [end] = tokenizer.eos_token_ids
    alphabet = alphabet_of(tokenizer, tokenizer.size)
    for seed in range(40):
        dice, constraint, tokens = (
            random.Random(seed),
            alphabet.constraint(regex(pattern), [end]),
            [],
        )
        while tokens[-1:] != [end] and len(tokens) < 80:
            bits = np.unpackbits(constraint.masks([])[0].view(np.uint8), bitorder="little")
            assert not constraint.stuck
            forced = constraint.forced()
            tokens.append(int(dice.choice(np.flatnonzero(bits).tolist())))
            assert not forced or tokens[-1] == forced[0]
            assert constraint.take(tokens[-1:]) == len(tokens[-1:])
        if tokens[-1] == end:
            text = tokenizer.decode(tokens)
            assert re.fullmatch(pattern, text), (tokens, text)


def test_forced_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Behind the first, before which a space may be missing."""
    for name, (make, kind) in TOKENIZERS.items():
        tokenizer = load_tokenizer(make(tmp_path / name), kind=kind)
        text = "Les des midi, midi"
        ids = [id for id in tokenizer.encode(text) if id not in tokenizer.special_ids]
        constraint = alphabet_of(tokenizer, tokenizer.size).constraint(regex(text), [1])
        assert constraint.take(ids[:1]) == len(ids[:1])
        assert constraint.forced() == ids[1:], name
