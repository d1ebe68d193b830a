"""Tokenizers are read from a checkpoint's files, and damaged files are named."""

from __future__ import annotations

import base64
import builtins
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec.errors import CheckpointError, OptionError, PromptError
from mlx_specdec.text import chat
from mlx_specdec.text.file_tokenizer import GROWTH, Growth
from mlx_specdec.text.prompts import prompt_ids
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer

from ..support.tokenizers import byte_level, sentence_piece, unigram


@pytest.mark.parametrize("make", [unigram, sentence_piece])
def test_an_encoder_decoder_prompt_ends_with_eos_once(tmp_path: Path, make) -> None:
    tokenizer = load_tokenizer(make(tmp_path), kind="encoder-decoder")
    ids = tokenizer.encode("Les pates")
    assert ids[-1] == 1 and ids.count(1) == 1
    assert tokenizer.eos_token_ids == (1,)


def test_a_decoder_only_prompt_begins_with_bos_once_and_stays_open(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
    ids = tokenizer.encode("def f(x):")
    assert ids[0] == 0 and ids.count(0) == 1 and 1 not in ids
    assert tokenizer.eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (byte_level, "decoder-only"),
        (unigram, "encoder-decoder"),
        (sentence_piece, "encoder-decoder"),
    ],
)
def test_text_survives_the_round_trip_without_special_tokens(tmp_path: Path, make, kind) -> None:
    tokenizer = load_tokenizer(make(tmp_path), kind=kind)
    for text in ("def read_lines(path):", "12 345,67", "pates"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_panic_of_the_library_is_an_error_of_the_text(tmp_path: Path) -> None:
    class PanicException(BaseException):
        """As pyo3's."""

    class Panics:
        def decode(self, ids: list[int], **settings: Any) -> str:
            raise PanicException("index out of bounds")

    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
    tokenizer._tokenizer = Panics()
    with pytest.raises(CheckpointError, match="fails on this text"):
        tokenizer.decode([5])


def test_extra_ids_count_down_behind_the_pieces(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path), kind="encoder-decoder")
    pieces = tokenizer.pieces()
    assert len(pieces) == tokenizer.size
    assert pieces[-1] == "<extra_id_0>" and pieces[-100] == "<extra_id_99>"
    assert tokenizer.decode([tokenizer.size - 1]) == ""


def test_the_chat_template_is_applied_up_to_the_answer(tmp_path: Path) -> None:
    template = (
        "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    directory = byte_level(
        tmp_path, chat_template=template, tokenizer_class="PreTrainedTokenizerFast"
    )
    tokenizer = load_tokenizer(directory, kind="decoder-only")
    assert tokenizer.has_chat_template
    assert tokenizer.decode(tokenizer.apply_chat("hello")) == "<user>hello<answer>"


def test_a_template_that_fails_is_one_line(tmp_path: Path) -> None:
    directory = byte_level(
        tmp_path,
        chat_template="{{ raise_exception('no system\nmessage') }}",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    with pytest.raises(CheckpointError, match="--no-chat-template") as told:
        load_tokenizer(directory, kind="decoder-only").apply_chat("hello")
    assert "\n" not in str(told.value)


MESSAGES = [{"role": "user", "content": "hello"}]


def chatty(directory: Path, template: str) -> Tokenizer:
    named = {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    return load_tokenizer(byte_level(directory, **named), kind="decoder-only")


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'x' * 10**10 }}", "more than 16777216 of something"),
        ("{{ [1] * (10**7 * 10) }}", "more than 16777216 of something"),
        ("{{ 10**10**9 }}", "more than 16777216 of something"),
        ("{{ '%1000000000d' % 3 }}", "more than 16777216 of something"),
        ("{{ '%*d' % (10**9, 3) }}", "more than 16777216 of something"),
        ("{{ '{:>1000000000}'.format(3) }}", "more than 16777216 of something"),
        ("{{ '%1000000000d'|format(3) }}", "more than 16777216 of something"),
        ("{{ 'x'.center(10**9) }}", "more than 16777216 of something"),
        ("{{ 'x'|center(10**9) }}", "more than 16777216 of something"),
        ("{{ ('a' * 9**6)|replace('a', 'b' * 9**6) }}", "more than 16777216 of something"),
        (
            "{% set n = namespace(x='x') %}{% for i in range(40) %}"
            "{% set n.x = n.x ~ n.x %}{% endfor %}",
            "more than 64 MiB",
        ),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "more than 1 s",
        ),
    ],
)
def test_a_template_is_bounded_in_size_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, says: str
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.6 if says.endswith(" s") else 60.0)
    monkeypatch.setattr(chat, "MEMORY_BYTES", 1 << 26)
    with pytest.raises(CheckpointError, match=f"cannot be applied .*{says}"):
        chatty(tmp_path, template).apply_chat("hello")


def test_a_prompt_is_text_ids_or_messages(tmp_path: Path) -> None:
    plain = load_tokenizer(byte_level(tmp_path / "a"), kind="decoder-only")
    templated = chatty(tmp_path / "b", "{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    for tokenizer, given, chat_template, text in (
        (plain, "hello", True, "hello"),
        (templated, "hello", False, "hello"),
        (templated, "hello", True, "[hello]"),
        (templated, MESSAGES * 2, False, "[hello][hello]"),
    ):
        ids = prompt_ids(tokenizer, given, chat_template=chat_template)
        assert tokenizer.decode(ids) == text
    assert prompt_ids(plain, np.array([3, 4]), chat_template=True) == [3, 4]


def test_the_template_is_given_the_system_prompt_and_settings(tmp_path: Path) -> None:
    tokenizer = chatty(
        tmp_path,
        "{% for m in messages %}[{{ m['role'] }} {{ m['content'] }}]{% endfor %}"
        "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}",
    )
    for prompt in ("hello", MESSAGES):
        ids = prompt_ids(
            tokenizer,
            prompt,
            chat_template=True,
            system_prompt="be brief",
            chat_settings={"enable_thinking": False},
        )
        assert tokenizer.decode(ids) == "[system be brief][user hello]False"


def test_settings_of_a_template_name_no_parameter_of_transformers() -> None:
    from transformers import PreTrainedTokenizerBase

    method = inspect.signature(PreTrainedTokenizerBase.apply_chat_template)
    for name in {*method.parameters, "messages"} - {"kwargs"}:
        with pytest.raises(OptionError, match=f"chat-template-config may not set {name}"):
            chat.check_settings({name: True})
    chat.check_settings({"enable_thinking": True, "date_string": "today"})


@pytest.mark.parametrize(
    ("prompt", "asked", "says"),
    [
        ("hello", {"system_prompt": ""}, "this model has none"),
        ("hello", {"chat_settings": {"a": 1}}, "this model has none"),
        ([3, 4], {"system_prompt": "be brief"}, "token ids take none"),
        (None, {}, "a prompt is text, token ids, or messages"),
        ("a\udcff", {}, "half a character"),
        ("hello", {"system_prompt": "a\ud800"}, "half a character"),
    ],
)
def test_what_is_no_prompt_or_asks_for_a_template_is_refused(
    tmp_path: Path, prompt: Any, asked: dict[str, Any], says: str
) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
    with pytest.raises(PromptError, match=says):
        prompt_ids(tokenizer, prompt, chat_template=True, **asked)


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (b"hello", "is bytes"),
        (" ", "is empty"),
        ([], "is empty"),
        (MESSAGES, "no chat template"),
        (["hello"], "a prompt is text"),
        ([1.5], "a prompt is text"),
        ([{"text": "hello"}], "a prompt is text"),
    ],
)
def test_any_other_prompt_is_refused(tmp_path: Path, prompt: Any, says: str) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
    with pytest.raises(PromptError, match=says):
        prompt_ids(tokenizer, prompt, chat_template=True)


def test_a_tokenizer_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(CheckpointError, match="knows any text"):
        load_tokenizer(tmp_path, kind="decoder-only")


def test_a_regular_expression_that_never_ends_is_one_line(tmp_path: Path) -> None:
    file = byte_level(tmp_path) / "tokenizer.json"
    whole = json.loads(file.read_text())
    whole["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    file.write_text(json.dumps(whole))
    tokenizer = load_tokenizer(tmp_path, kind="decoder-only")
    with pytest.raises(CheckpointError, match=r"fails on this text .*retry-limit") as told:
        tokenizer.encode("a" * 40 + "b")
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("kind", ["encoder-decoder", "decoder-only"])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, kind) -> None:
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path, kind=kind)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "spiece.model"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b'["not this"')
    with pytest.raises(CheckpointError, match=file) as told:
        load_tokenizer(tmp_path, kind="encoder-decoder")
    assert "\n" not in str(told.value)


def test_an_encoder_decoder_tokenizer_never_imports_transformers(tmp_path: Path) -> None:
    unigram(tmp_path / "a")
    sentence_piece(tmp_path / "b")
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from mlx_specdec.text.tokenizer import load_tokenizer\n"
        "for path in sys.argv[1:]:\n"
        "    load_tokenizer(Path(path), kind='encoder-decoder').encode('a')\n"
        "assert not {'transformers', 'torch', 'mlx_lm'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "a", tmp_path / "b"], check=True)


@pytest.mark.parametrize("make", [byte_level, unigram, sentence_piece])
def test_the_digest_changes_with_the_tokenizers_files_alone(tmp_path: Path, make) -> None:
    kind = "decoder-only" if make is byte_level else "encoder-decoder"
    tokenizer = load_tokenizer(make(tmp_path), kind=kind)
    before = tokenizer.digest
    (tmp_path / "config.json").write_text("{}")
    assert tokenizer.digest == before
    for file in list(tmp_path.iterdir()):
        if file.name != "config.json":
            content = file.read_bytes()
            file.write_bytes(content + b"\n")
            assert tokenizer.digest != before
            file.write_bytes(content)
    assert tokenizer.digest == before


def test_sentinels_in_a_prompt_are_tokens_that_swallow_the_spaces_around(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path), kind="encoder-decoder")

    def body(text: str) -> list[int]:
        return tokenizer.encode(text)[:-1]

    top = tokenizer.size - 1
    expected = [*body("Les"), top, *body("pates"), top - 99, 1]
    assert tokenizer.encode("Les <extra_id_0> pates <extra_id_99>") == expected
    assert top - 100 not in tokenizer.encode("<extra_id_100>")


def test_a_long_run_of_spaces_is_read_in_linear_time(tmp_path: Path) -> None:
    """In quadratic time this takes a quarter of an hour."""
    tokenizer = load_tokenizer(sentence_piece(tmp_path), kind="encoder-decoder")
    ids = tokenizer.encode(" " * 1_000_000 + "<extra_id_0>" + " " * 1_000_000)
    assert ids == [tokenizer.size - 1, 1]


@pytest.mark.parametrize(("said", "extra"), [("{}", 100), ('{"extra_ids": 0}', 0)])
def test_the_number_of_sentinels_is_said_by_the_settings(
    tmp_path: Path, said: str, extra: int
) -> None:
    size = load_tokenizer(sentence_piece(tmp_path), kind="encoder-decoder").size - 100
    (tmp_path / "tokenizer_config.json").write_text(said)
    assert load_tokenizer(tmp_path, kind="encoder-decoder").size == size + extra


@pytest.mark.parametrize("count", ["-1", '"many"', "1e3", "[100]"])
def test_an_odd_number_of_sentinels_is_refused(tmp_path: Path, count: str) -> None:
    sentence_piece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"extra_ids": {count}}}')
    with pytest.raises(CheckpointError, match="extra_ids"):
        load_tokenizer(tmp_path, kind="encoder-decoder")


def test_code_that_comes_with_a_tokenizer_is_not_run_and_nobody_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, asked = tmp_path / "ran", []
    monkeypatch.setattr(builtins, "input", lambda *words: asked.append(words) or "y")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path, kind="decoder-only")
    assert not ran.exists() and asked == []


@pytest.mark.parametrize(
    "vocabulary, words",
    [
        (None, "can be read: download its vocabulary, tokenizer.json or tokenizer.model"),
        (b"\x0a\xff", r"tokenizer.model is damaged \(.*\): download it again"),
        (b"", r"tokenizer.model is damaged \(.*\): download it again"),
    ],
)
def test_a_vocabulary_that_is_missing_or_damaged_is_told_in_one_line(
    vocabulary: bytes | None, words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if vocabulary is not None:
        (tmp_path / "tokenizer.model").write_bytes(vocabulary)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(tmp_path, kind="decoder-only")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


# What a tokenizer.json makes of a text is bounded, by what its steps declare, before they run.


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
