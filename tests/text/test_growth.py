"""What a tokenizer.json makes of a text is bounded, by what its steps declare, before they run."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.file_tokenizer import GROWTH, Growth
from mlx_specdec.text.tokenizer import load_tokenizer

from ..support.tokenizers import byte_level, sentence_piece

REFUSED = "it makes far more of .* than any tokenizer does"


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def steps(*each: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(each)}


def charsmap(*texts: bytes) -> bytes:
    trie = bytes(1024)
    return len(trie).to_bytes(4, "little") + trie + b"".join(text + b"\0" for text in texts)


def precompiled(*texts: bytes) -> dict[str, Any]:
    told = base64.b64encode(charsmap(*texts)).decode()
    return {"type": "Precompiled", "precompiled_charsmap": told}


def template(times: int) -> dict[str, Any]:
    text = {"Sequence": {"id": "A", "type_id": 0}}
    return {"type": "TemplateProcessing", "single": [text] * times, "pair": []}


NFKD = {"type": "NFKD"}
LETTER = replace("a", "a" * 60)
NESTED = steps(steps(LETTER, steps(LETTER)), LETTER)


def growth(**told: Any) -> Growth:
    return Growth(Path("tokenizer.json"), json.dumps(told))


@pytest.mark.parametrize(
    ("text", "declared"),
    [
        ("a" * 99, {"normalizer": steps(LETTER, LETTER, LETTER)}),
        ("a", {"normalizer": NESTED}),
        ("b" * 900, {"normalizer": steps(*[replace("x*", "y" * 60, "Regex")] * 2)}),
        ("b" * 900, {"normalizer": steps(*[replace("", "y" * 60)] * 2)}),
        ("\ufdfa", {"normalizer": steps(*[NFKD, replace("\u0644", "\ufdfa")] * 6)}),
        ("a" * 300, {"normalizer": LETTER, "post_processor": template(9)}),
        ("a", {"normalizer": NESTED, "post_processor": template(0)}),
        ("ab", {"normalizer": steps(*[replace("", "b" * 60), replace("ab", "bba")] * 300)}),
    ],
)
def test_what_multiplies_a_text_is_refused(text: str, declared: dict[str, Any]) -> None:
    bounded = growth(**declared)
    with pytest.raises(CheckpointError, match=REFUSED) as problem:
        bounded.check(text)
    assert len(str(problem.value)) < 200


@pytest.mark.parametrize(
    "declared",
    [
        {"normalizer": replace("x*", "y" * 999, "Regex")},
        {"normalizer": {"type": "Prepend", "prepend": "z" * 200_000}},
        {"normalizer": precompiled(b"y" * 2000)},
        {"post_processor": template(1000)},
        {"post_processor": steps(*[template(2)] * 40, name="processors")},
        {"decoder": steps(*[replace("a", "a" * 10)] * 3, name="decoders")},
        {"normalizer": NESTED, "added_tokens": [{"content": "aaa", "normalized": True}]},
        {"normalizer": steps(LETTER, LETTER), "added_tokens": [{"content": "a" * 900}]},
    ],
)
def test_what_grows_whatever_the_text_is_refused_when_it_is_read(declared: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=REFUSED):
        growth(**declared)


def test_escapes_hide_no_name() -> None:
    text = json.dumps({"normalizer": NESTED}).replace("normalizer", "\\u006eormali\\u007Aer")
    with pytest.raises(CheckpointError, match="is damaged"):
        Growth(Path("tokenizer.json"), text)


@pytest.mark.parametrize(
    "text",
    [
        '{"normalizer": {"type": "NFC"}, "normalizer": {"type": "NFC"}}',
        '{"normalizer": {"type": "Sequence", "normalizers": 3}}',
        '{"normalizer": {"type": "Prepend", "prepend": 5}}',
        '{"normalizer": {"type": "Precompiled", "precompiled_charsmap": "é"}}',
        '{"normalizer": {',
        '{"normalizer": [1]}',
        '{"normalizer": ' + "[" * 100_000,
        '{"post_processor": {"type": "TemplateProcessing", "single": 3}}',
        '{"added_tokens": [3]}',
    ],
)
def test_what_cannot_be_bounded_is_damaged(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"is damaged .*: download it again"):
        Growth(Path("tokenizer.json"), text)


ALBERT = (replace("``", '"'), NFKD, {"type": "StripAccents"}, {"type": "Lowercase"})
QUOTES = steps(*(replace(chr(0x2010 + place), "...") for place in range(60)))


@pytest.mark.parametrize(
    "normalizer",
    [
        None,
        {"type": "NFC"},
        {"type": "NFKC"},
        replace(" ", "▁"),
        steps({"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")),
        steps({"type": "Nmt"}, {"type": "NFKC"}, replace(" {2,}", " ", "Regex")),
        steps(*ALBERT, precompiled(b"ss", b"y" * 33)),
        QUOTES,
        {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
        | {"strip_accents": None, "lowercase": True},
    ],
)
def test_tokenizers_as_there_are_may_be_given_any_text(normalizer: dict[str, Any] | None) -> None:
    bounded = growth(normalizer=normalizer, model={"vocab": {"normalizer": 1, "decoder": 2}})
    for text in ("", "a", "déjà vu … " * 5000, "\ufdfa" * 1000, " " * 200_000):
        bounded.check(text)


def test_the_text_decides(tmp_path: Path) -> None:
    """Steps that find nothing in a prompt do no harm."""
    byte_level(tmp_path, chat_template="{% for m in messages %}{{ m.content }}{% endfor %}a")
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": NESTED}))
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    assert tokenizer.decode(tokenizer.encode("deux oeufs")) == "deux oeufs"
    with pytest.raises(CheckpointError, match=f"{file} is refused: {REFUSED}"):
        tokenizer.encode("a midi")
    with pytest.raises(CheckpointError, match=f"{file} is refused: {REFUSED}"):
        tokenizer.apply_chat("deux oeufs")


@pytest.mark.parametrize("letters", [GROWTH, GROWTH + 1])
def test_a_sentencepiece_file_that_writes_much_is_refused(tmp_path: Path, letters: int) -> None:
    rules = tmp_path / "rules.tsv"
    rules.write_text(f"61\t{' '.join(['79'] * letters)}\n")
    sentence_piece(tmp_path, normalization_rule_tsv=str(rules))
    if letters <= GROWTH:
        assert load_tokenizer(tmp_path, kind="encoder-decoder").size
        return
    with pytest.raises(CheckpointError, match=r"spiece\.model is refused: it writes more than 64"):
        load_tokenizer(tmp_path, kind="encoder-decoder")
