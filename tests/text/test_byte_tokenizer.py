"""ByT5's bytes, held to what transformers makes of the same texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer
from mlx_specdec.text.vocabulary import common_size

FIXTURE = Path(__file__).parents[1] / "fixtures" / "t5-text" / "byt5"
BYT5 = load_tokenizer(FIXTURE, kind="encoder-decoder")
Load = Callable[..., Tokenizer]
SENTINELS = [f"<extra_id_{index}>" for index in range(125)]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """A ByT5's tokenizer from settings and added tokens."""

    def loaded(said: dict[str, Any], added: dict[str, Any] | None = None) -> Tokenizer:
        settings = {"tokenizer_class": "ByT5Tokenizer", **said}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "added_tokens.json").write_text(json.dumps(added or {}))
        return load_tokenizer(tmp_path, kind="encoder-decoder")

    return loaded


def test_texts_become_the_ids_of_transformers_and_back() -> None:
    known = json.loads((FIXTURE / "expected.json").read_text(encoding="utf-8"))
    assert len(known) >= 10
    for each in known:
        if each["text"] is not None:
            assert BYT5.encode(each["text"]) == each["ids"]
        # transformers leaves out bytes that are no UTF-8; here they are shown, as of any other.
        assert BYT5.decode(each["ids"]).replace("\ufffd", "") == each["decoded"]


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
def test_every_way_to_write_the_settings_means_the_same_ids(
    load: Load, said: dict[str, Any]
) -> None:
    tokenizer = load(said)
    assert tokenizer.size == 384 and tokenizer.eos_token_ids == (1,)
    assert tokenizer.encode("<extra_id_0>a<extra_id_124><extra_id_12>") == [259, 100, 383, 271, 1]
    assert tokenizer.special_ids == {0, 1, 2, *range(259, 384)}


@pytest.mark.parametrize("where", ["config.json", "tokenizer_config.json"])
def test_the_class_is_found_in_either_file(tmp_path: Path, where: str) -> None:
    (tmp_path / where).write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    tokenizer = load_tokenizer(tmp_path, kind="encoder-decoder")
    assert tokenizer.encode("é") == [198, 172, 1] and tokenizer.size == 384


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text().filter(lambda text: not any(name in text for name in ("<", ">"))))
def test_any_text_survives_and_ends_once(text: str) -> None:
    ids = BYT5.encode(text)
    assert len(ids) == len(text.encode()) + 1 and ids.count(1) == 1
    assert BYT5.decode(ids) == text


def test_spaces_around_the_end_token_belong_to_it_unless_a_file_says_no(load: Load) -> None:
    kept = {"eos_token": {"content": "</s>", "lstrip": False, "rstrip": False}}
    assert load({}).encode("a </s> b") == [100, 1, 101, 1]
    assert load(kept).encode("a </s> b") == [100, 35, 1, 35, 101, 1]
    assert load({}).encode("a</s>") == [100, 1]


def test_pieces_name_every_id_and_compare_with_another_byte_tokenizer(load: Load) -> None:
    tokenizer = load({})
    pieces = tokenizer.pieces()
    assert len(pieces) == 384 and None not in pieces and len(set(pieces)) == 384
    assert pieces[:4] == ["<pad>", "</s>", "<unk>", "Ā"] and pieces[ord("a") + 3] == "a"
    assert common_size(tokenizer, load({"extra_ids": 100}), 384, 384) == 384


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
        ({"eos_token": "<pad>"}, {}),
        ({"eos_token": "a"}, {}),
        ({"added_tokens_decoder": {"99999999999": {"content": "<a>"}}}, {}),
    ],
)
def test_what_contradicts_the_convention_is_one_sentence(
    load: Load, said: dict[str, Any], added: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError) as told:
        load(said, added)
    assert "\n" not in str(told.value)
