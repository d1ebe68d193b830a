"""ByT5's bytes, held to what transformers makes of the same texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.byte_tokenizer import ByteTokenizer
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.text.vocabulary import common_size

FIXTURE = Path(__file__).parents[1] / "fixtures" / "t5-text" / "byt5"
SENTINELS = [f"<extra_id_{index}>" for index in range(125)]


def test_texts_become_the_ids_of_transformers_and_back() -> None:
    tokenizer = load_tokenizer(FIXTURE, kind="encoder-decoder")
    known = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))
    assert len(known) >= 10
    for each in known:
        if each["text"] is not None:
            assert tokenizer.encode(each["text"]) == each["ids"]
        assert tokenizer.decode(each["ids"]) == each["decoded"]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"extra_ids": 125},
        {"extra_ids": 125, "additional_special_tokens": SENTINELS},
        {"extra_ids": 0, "extra_special_tokens": [{"content": token} for token in SENTINELS]},
        {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None},
    ],
)
def test_every_way_to_write_the_settings_means_the_same_ids(said: dict[str, Any]) -> None:
    tokenizer = ByteTokenizer(said)
    assert tokenizer.size == 384 and tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("<extra_id_0>a<extra_id_124><extra_id_12>") == [259, 100, 383, 271, 1]
    assert tokenizer.digest == ByteTokenizer({}).digest
    assert tokenizer.special_ids == {0, 1, 2, *range(259, 384)}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_the_class_is_found_in_either_file(tmp_path: Path, where: str) -> None:
    (tmp_path / where).write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path, kind="encoder-decoder")
    assert tokenizer.encode("é") == [198, 172, 1] and tokenizer.size == 384


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text().filter(lambda text: not any(name in text for name in ("<", ">"))))
def test_any_text_survives_and_ends_once(text: str) -> None:
    tokenizer = ByteTokenizer({})
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) + 1 and ids.count(1) == 1
    assert tokenizer.decode(ids) == text


def test_spaces_around_the_end_token_belong_to_it_unless_a_file_says_no() -> None:
    kept = {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False}}
    assert ByteTokenizer({}).encode("a </s> b") == [100, 1, 101, 1]
    assert ByteTokenizer(kept).encode("a </s> b") == [100, 35, 1, 35, 101, 1]
    assert ByteTokenizer({}).encode("a</s>") == [100, 1]


def test_pieces_name_every_id_and_compare_with_another_byte_tokenizer() -> None:
    tokenizer = ByteTokenizer({})
    pieces = tokenizer.pieces()
    assert len(pieces) == 384 and None not in pieces and len(set(pieces)) == 384
    assert pieces[:4] == ["<pad>", "</s>", "<unk>", "Ā"] and pieces[ord("a") + 3] == "a"
    assert common_size(tokenizer, ByteTokenizer({"extra_ids": 100}), 384, 384) == 384


@pytest.mark.parametrize(
    ("said", "added"),
    [
        ({"extra_ids": -1}, {}),
        ({"extra_ids": "many"}, {}),
        ({"extra_ids": 10**9}, {}),
        ({}, {"<a>": 100}),
        ({}, {"<a>": "first"}),
        ({}, {"<a>": [1]}),
        ({"added_tokens_decoder": {"x": {"content": "<a>"}}}, {}),
        ({"added_tokens_decoder": {"99999999999": {"content": "<a>"}}}, {}),
    ],
)
def test_what_contradicts_the_convention_is_one_sentence(
    said: dict[str, Any], added: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as told:
        ByteTokenizer(said, added)
    assert "\n" not in str(told.value)


def test_there_is_no_chat_template() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ByteTokenizer({}).apply_chat("hello")
