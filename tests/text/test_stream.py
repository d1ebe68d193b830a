"""Pieces add up to the whole text, nothing printed is ever taken back, stops straddle pushes."""

import json
import random
import re
from collections.abc import Sequence
from os.path import commonprefix
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.engine.pair import alphabet_of
from mlx_specdec.text.stream import LONGEST_WINDOW, SHORT_WINDOW, TextStream
from mlx_specdec.text.tokenizer import Kind, Tokenizer, load_tokenizer

from ..support.letters import regex
from ..support.tokenizers import TEXT, byte_level, sentence_piece, unigram

BYT5 = Path(__file__).parents[1] / "fixtures" / "t5-text" / "byt5"


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    root: Path = tmp_path_factory.mktemp("tokenizers")
    return [
        load_tokenizer(byte_level(root / "bytes"), kind="decoder-only"),
        load_tokenizer(unigram(root / "unigram"), kind="encoder-decoder"),
        load_tokenizer(sentence_piece(root / "pieces"), kind="encoder-decoder"),
        load_tokenizer(BYT5, kind="encoder-decoder"),
    ]


def in_pushes(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], before: Sequence[int] = ()
) -> list[str]:
    stream, pieces, start = TextStream(tokenizer, None, before), [], 0
    for size in [*sizes, len(ids)]:
        pieces.append(stream.push(ids[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("size", [1, 2, 5])
def test_real_text_adds_up_and_comes_early(
    tokenizers: list[Tokenizer], which: int, size: int
) -> None:
    tokenizer = tokenizers[which]
    for text in ["\n".join(TEXT), *TEXT]:
        ids = tokenizer.encode(text)
        pieces = in_pushes(tokenizer, ids, [size] * (len(ids) // size))
        assert "".join(pieces) == tokenizer.decode(ids)
        # Only runs of byte pieces, which tokenizer 1 has outside ASCII, may come late.
        if which != 1 or text.isascii():
            assert sum(bool(piece) for piece in pieces) > len(ids) / size / 4


# Texts that continue a prompt.

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHIPPED = Path(__file__).parents[2] / "weights"


@pytest.fixture(scope="module")
def every_kind(
    tokenizers: list[Tokenizer], tmp_path_factory: pytest.TempPathFactory
) -> list[Tokenizer]:
    root = tmp_path_factory.mktemp("kinds")
    usual = {"pad_id": -1, "unk_id": 0, "bos_id": 1, "eos_id": 2}
    (sentence_piece(root, **usual) / "spiece.model").rename(root / "tokenizer.model")
    settings = {"tokenizer_class": "LlamaTokenizer", "legacy": False}
    (root / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    encoding = [*(FIXTURES / "bart-tokenizers").iterdir(), FIXTURES / "t5-text" / "codet5"]
    return [
        *tokenizers,
        load_tokenizer(root, kind="decoder-only"),
        load_tokenizer(SHIPPED / "py-llama", kind="decoder-only"),
        *(load_tokenizer(each, kind="encoder-decoder") for each in sorted(encoding)),
    ]


@settings(max_examples=250, deadline=None, derandomize=True)
@given(
    st.integers(0, 99),
    st.lists(st.integers(0, 10_000), max_size=40),
    st.lists(st.integers(0, 10_000), max_size=40),
    st.lists(st.integers(0, 7), max_size=20),
)
def test_a_continuation_adds_up_to_the_whole_text(
    every_kind: list[Tokenizer], which: int, before: list[int], after: list[int], sizes: list[int]
) -> None:
    tokenizer = every_kind[which % len(every_kind)]
    prompt, output = ([number % tokenizer.size for number in ids] for ids in (before, after))
    pieces = in_pushes(tokenizer, output, sizes, prompt)
    assert "".join(pieces) == continuation(tokenizer, prompt, output)


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int]) -> str:
    """What output adds to the text of a prompt, which may end within a character."""
    read, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + output)
    return whole[len(commonprefix([read, whole])) :]  # noqa: RUF071


def test_the_blank_before_a_continuation_is_printed(every_kind: list[Tokenizer]) -> None:
    for tokenizer in every_kind[:6]:
        prompt, output = (
            [id for id in tokenizer.encode(text) if id not in tokenizer.special_ids]
            for text in ("Les", "Les des midi")
        )
        text = "".join(in_pushes(tokenizer, output[len(prompt) :], [1] * 9, prompt))
        assert output[: len(prompt)] == prompt and text == " des midi", tokenizer


def test_each_push_decodes_a_bounded_window(tokenizers: list[Tokenizer]) -> None:
    longest = 0

    class Watched:
        special_ids, byte_ids = tokenizers[0].special_ids, tokenizers[0].byte_ids

        def decode(self, ids):
            nonlocal longest
            longest = max(longest, len(ids))
            return tokenizers[0].decode(ids)

    ids = tokenizers[0].encode("def read_lines(path):\n" * 60)
    in_pushes(Watched(), ids, [3] * len(ids))
    assert SHORT_WINDOW < longest <= LONGEST_WINDOW + 3


# Texts bound by a grammar, in the tokens of every kind of tokenizer: what is printed fits.


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
    for seed in range(12):
        dice, constraint, tokens = (
            random.Random(seed),
            alphabet.constraint(regex(pattern), [end]),
            [],
        )
        while tokens[-1:] != [end] and len(tokens) < 80:
            [allowed] = constraint.masks([])
            assert not constraint.stuck
            forced = constraint.forced()
            tokens.append(int(dice.choice(np.flatnonzero(allowed).tolist())))
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
