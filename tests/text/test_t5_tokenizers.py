"""CodeT5's vocab.json and merges.txt and ByT5's bytes give the ids that transformers gave."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import load_tokenizer
from mlx_specdec.text.vocabulary import token_bytes

FILES = Path(__file__).parents[1] / "fixtures" / "t5-text"


@pytest.mark.parametrize("name", ["codet5", "byt5"])
def test_texts_become_the_ids_of_transformers_and_back(name: str) -> None:
    tokenizer = load_tokenizer(FILES / name, kind="encoder-decoder")
    known = json.loads((FILES / name / "expected.json").read_text(encoding="utf-8"))
    assert len(known) >= 10
    for each in known:
        if each["text"] is not None:
            assert tokenizer.encode(each["text"]) == each["ids"]
        assert tokenizer.decode(each["ids"]) == each["decoded"]


def test_without_any_other_file_the_vocabulary_is_roberta_s(tmp_path: Path) -> None:
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(FILES / "codet5" / name, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    tokenizer = load_tokenizer(tmp_path, kind="encoder-decoder")
    known = json.loads((FILES / "codet5" / "expected.json").read_text(encoding="utf-8"))
    for each in known:
        assert "<" in each["text"] or tokenizer.encode(each["text"]) == each["ids"]
    (tmp_path / "vocab.json").unlink()
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(CheckpointError, match="download its vocabulary"):
        load_tokenizer(tmp_path, kind="encoder-decoder")


def test_special_tokens_and_pieces_are_known() -> None:
    tokenizer = load_tokenizer(FILES / "codet5", kind="encoder-decoder")
    first = len(json.loads((FILES / "codet5" / "vocab.json").read_text(encoding="utf-8")))
    assert tokenizer.eos_token_ids == (2,) and tokenizer.size == first + 5
    assert tokenizer.special_ids == {0, 1, 2, 3, 4, *range(first, first + 5)}
    assert tokenizer.pieces()[-1] == "<extra_id_0>"
    byt5 = load_tokenizer(FILES / "byt5", kind="encoder-decoder")
    assert byt5.eos_token_ids == (1,) and byt5.size == 384
    assert byt5.special_ids == {0, 1, 2, *range(259, 384)}
    assert token_bytes(byt5)[3:259] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("file", "content"), [("vocab.json", "[]"), ("merges.txt", "zzz yyy\n"), ("vocab.json", "{")]
)
def test_damage_is_one_line(tmp_path: Path, file: str, content: str) -> None:
    directory = Path(shutil.copytree(FILES / "codet5", tmp_path / "codet5"))
    (directory / file).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError) as error:
        load_tokenizer(directory, kind="encoder-decoder")
    assert "\n" not in str(error.value)
