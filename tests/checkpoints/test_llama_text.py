"""Meta's tokenizers: the ids that sentencepiece and tiktoken give, out of tokenizer.json."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats.vocabularies import read_tokenizer
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.file_tokenizer import FileTokenizer
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.meta_files import META, copy_meta

EXPECTED = json.loads((META / "expected_ids.json").read_text(encoding="ascii"))
SENTENCEPIECE, TIKTOKEN = META / "tokenizer.model", META / "llama3" / "tokenizer.model"


def loaded(file: Path, directory: Path, vocabulary: int) -> FileTokenizer:
    """What is made of a tokenizer file, as the rest of the program reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in read_tokenizer(file, vocabulary).files.items():
        (directory / name).write_text(text, encoding="utf-8")
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    assert isinstance(tokenizer, FileTokenizer)
    return tokenizer


def refusal(file: Path, vocabulary: int = 340) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(file, vocabulary)
    text = str(caught.value)
    assert text.startswith(str(file)) and "\n" not in text and len(text) < len(str(file)) + 300
    return text


def test_ids_are_those_of_sentencepiece_behind_the_beginning(tmp_path: Path) -> None:
    tokenizer = loaded(SENTENCEPIECE, tmp_path, 340)
    for text, ids in EXPECTED["sentencepiece"].items():
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode([1, *ids, 2]) == text
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}


def test_ids_are_those_of_tiktoken_behind_the_beginning(tmp_path: Path) -> None:
    tokenizer = loaded(TIKTOKEN, tmp_path, 576)
    for text, ids in EXPECTED["tiktoken"].items():
        assert tokenizer.encode(text) == [320, *ids]
        assert tokenizer.decode([320, *ids, 321]) == text
    assert tokenizer.size == 576
    assert tokenizer.encode("<|eot_id|>") == [320, 329]


@pytest.mark.slow
@given(st.text(max_size=40) | st.text(alphabet="Ontlie d,\n\t3'▁", max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text_gets_the_ids_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(SENTENCEPIECE))
    if any(token in text for token in ("<s>", "</s>", "<unk>")):
        return  # names of control tokens become these tokens here
    tokenizer = loaded(SENTENCEPIECE, tmp_path_factory.mktemp("text"), 340)
    assert tokenizer.encode(text) == [1, *processor.encode(text)]


@pytest.mark.parametrize("since_31", [False, True])
def test_llama_3s_special_tokens_lie_where_its_generation_has_them(since_31: bool) -> None:
    made = read_tokenizer(TIKTOKEN, 576, since_31=since_31)
    added = json.loads(made.files["tokenizer.json"])["added_tokens"]
    names = {token["content"]: token["id"] - 320 for token in added}
    assert len(names) == 256 and all(token["special"] for token in added)
    for place, name in ((0, "begin_of_text"), (1, "end_of_text"), (6, "start_header_id")):
        assert names[f"<|{name}|>"] == place
    assert names["<|eot_id|>"] == 9
    assert names.get("<|eom_id|>") == (8 if since_31 else None)
    assert names["<|reserved_special_token_2|>"] == (5 if since_31 else 4)
    assert names["<|reserved_special_token_247|>"] == (255 if since_31 else 252)
    assert made.ids["eos_token_id"] == ([321, 328, 329] if since_31 else [321, 329])


def test_mlx_lms_way_of_loading_a_tokenizer_gives_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for name, kind in (("llama2", "sentencepiece"), ("llama3", "tiktoken")):
        out = convert(str(copy_meta(name, tmp_path)), tmp_path / f"{name}-out").path
        tokenizer = AutoTokenizer.from_pretrained(out, local_files_only=True)
        for text, ids in EXPECTED[kind].items():
            assert tokenizer.encode(text) == [tokenizer.bos_token_id, *ids]


def test_the_tokenizer_beside_the_folder_is_taken_where_the_folder_has_none(tmp_path: Path) -> None:
    source = copy_meta("llama1", tmp_path)
    own = convert(str(source), tmp_path / "first").path / "tokenizer.json"
    shutil.copy(SENTENCEPIECE, source)
    (tmp_path / "tokenizer.model").unlink()
    assert (convert(str(source), tmp_path / "second").path / own.name).read_bytes() == (
        own.read_bytes()
    )


def test_a_tokenizer_of_another_model_is_refused() -> None:
    assert "340 tokens where the model knows 339" in refusal(SENTENCEPIECE, 339)
    assert "320 tokens and 256 special ones" in refusal(TIKTOKEN, 575)


def test_a_model_may_know_more_ids_than_its_tokenizer(tmp_path: Path) -> None:
    assert loaded(SENTENCEPIECE, tmp_path, 384).size == 340
    assert read_tokenizer(TIKTOKEN, 1000).size == 576


def line(token: bytes, rank: object) -> bytes:
    return base64.b64encode(token) + f" {rank}\n".encode()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:500], "line"),
        (lambda data: data + b"!\n", "line 321"),
        (lambda data: data + line(b"xyz", 400), "line 321"),
        (lambda data: data + line(b"xyz", "9" * 5000), "line 321"),
        (lambda data: data + b"QQ=A 320\n", "line 321"),
        (lambda data: data + line(b"a", 320), "line 321"),
        (lambda data: data + line(b"a" * 2000, 320), "line 321"),
        (lambda data: line(b"\xff", 0) + line(b"b", 1), "single bytes"),
    ],
)
def test_a_damaged_tiktoken_file_is_one_sentence(tmp_path: Path, change: Any, words: str) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(change(TIKTOKEN.read_bytes()))
    assert words in refusal(file, 1000)


@pytest.mark.parametrize("data", [b"", b"\x0a", b"no tokenizer", bytes(100), b"\xff" * 100])
def test_a_damaged_sentencepiece_model_is_one_sentence(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(data)
    refusal(file)


def test_a_truncated_sentencepiece_model_is_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    file.write_bytes(SENTENCEPIECE.read_bytes()[:-700])
    refusal(file)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_damage_to_a_tokenizer_is_at_worst_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    known = [(TIKTOKEN, 576), (SENTENCEPIECE, 340)]
    source, vocabulary = data.draw(st.sampled_from(known))
    whole = bytearray(source.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / source.name
    file.write_bytes(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    try:
        assert read_tokenizer(file, vocabulary).size <= vocabulary
    except CheckpointError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 400
