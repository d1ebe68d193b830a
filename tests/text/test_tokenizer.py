"""Tokenizers are read from a checkpoint's files, and damaged files are named."""

import json
import shutil
from pathlib import Path

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text import chat
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer
from mlx_specdec.text.vocabulary import token_bytes

from ..support.tokenizers import byte_level


def chatty(directory: Path, template: str) -> Tokenizer:
    named = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    return load_tokenizer(byte_level(directory, **named), kind="decoder-only")


LOOP = "{% for i in range(99999) %}"
ENDLESS = {
    "more than 16777216 characters": f"{LOOP}{{{{ 'hello' * 100 }}}}{{% endfor %}}",
    "it takes more than 0 s": f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}",
    "more than 0 s": "{% for i in range(99999) if i in range(99999) | list %}{% endfor %}",
    "it takes more than 0 s of computing": (
        "{% macro m(n) %}{% if n %}{% set a = m(n - 1) ~ m(n - 1) %}{% endif %}{% endmacro %}"
        "{{ m(99) }}"
    ),
    "Range too big": "{% for i in range(10**9) %}{% endfor %}",
    "'__class__' of 'str' object is unsafe": "{{ ''.__class__.__mro__ }}",
}


@pytest.mark.parametrize("reason", ENDLESS)
def test_a_hostile_template_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.01 if "0 s" in reason else 60.0)
    with pytest.raises(CheckpointError, match=f"cannot be applied .*{reason}") as caught:
        chatty(tmp_path, ENDLESS[reason]).apply_chat("hello")
    assert "\n" not in str(caught.value)


FILES = Path(__file__).parents[1] / "fixtures" / "t5-text"


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
    assert tokenizer.pieces[-1] == "<extra_id_0>"
    byt5 = load_tokenizer(FILES / "byt5", kind="encoder-decoder")
    assert byt5.eos_token_ids == (1,) and byt5.size == 384
    assert byt5.special_ids == {0, 1, 2, *range(259, 384)}
    assert token_bytes(byt5)[3:259] == [bytes([byte]) for byte in range(256)]
