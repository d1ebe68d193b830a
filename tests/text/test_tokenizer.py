"""Tokenizers are read from a checkpoint's files, and damaged files are named."""

import builtins
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlx_specdec.errors import CheckpointError, OptionError, PromptError
from mlx_specdec.text import chat, sandbox
from mlx_specdec.text.prompts import prompt_ids
from mlx_specdec.text.tokenizer import Tokenizer, load_tokenizer
from mlx_specdec.text.vocabulary import token_bytes

from ..support.tokenizers import byte_level, sentence_piece, unigram

MESSAGES = [{"role": "user", "content": "hello"}]


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
    monkeypatch.setattr(sandbox, "SECONDS", 0.01 if "0 s" in reason else 60.0)
    with pytest.raises(CheckpointError, match=f"cannot be applied .*{reason}") as caught:
        chatty(tmp_path, ENDLESS[reason]).apply_chat("hello")
    assert "\n" not in str(caught.value)


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
    ("prompt", "given", "says"),
    [
        (b"hello", {}, "is bytes"),
        (" ", {}, "is empty"),
        ([], {}, "is empty"),
        (MESSAGES, {}, "no chat template"),
        ([1.5], {}, "a prompt is text"),
        ([{"text": "hello"}], {}, "a prompt is text"),
        ("hello", {"system_prompt": ""}, "this model has none"),
        ("hello", {"chat_settings": {"a": 1}}, "this model has none"),
        ([3, 4], {"system_prompt": "be brief"}, "token ids take none"),
        (None, {}, "a prompt is text, token ids, or messages"),
        ("a\udcff", {}, "half a character"),
        ("hello", {"system_prompt": "a\ud800"}, "half a character"),
    ],
)
def test_what_is_no_prompt_or_asks_for_a_template_is_refused(
    tmp_path: Path, prompt: Any, given: dict[str, Any], says: str
) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
    with pytest.raises(PromptError, match=says):
        prompt_ids(tokenizer, prompt, chat_template=True, **given)


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
    with pytest.raises(CheckpointError, match=r"fails on this text .*retry-limit") as caught:
        tokenizer.encode("a" * 40 + "b")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "spiece.model"])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b'["not this"')
    with pytest.raises(CheckpointError, match=file) as caught:
        load_tokenizer(tmp_path, kind="encoder-decoder")
    assert "\n" not in str(caught.value)


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


def test_the_digest_changes_with_the_tokenizers_files_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path), kind="decoder-only")
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


def test_the_number_of_sentinels_is_said_by_the_settings(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentence_piece(tmp_path), kind="encoder-decoder")
    pieces = tokenizer.pieces()
    assert (pieces[-1], pieces[-100], len(pieces)) == (
        "<extra_id_0>",
        "<extra_id_99>",
        tokenizer.size,
    )
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 0}')
    assert load_tokenizer(tmp_path, kind="encoder-decoder").size == tokenizer.size - 100


def test_code_that_comes_with_a_tokenizer_is_not_run_and_no_question_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, questions = tmp_path / "ran", []
    monkeypatch.setattr(builtins, "input", lambda *words: questions.append(words) or "y")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        load_tokenizer(tmp_path, kind="decoder-only")
    assert not ran.exists() and questions == []


@pytest.mark.parametrize(
    "vocabulary, words",
    [
        (None, "can be read: download its vocabulary, tokenizer.json or tokenizer.model"),
        (b"\x0a\xff", r"tokenizer.model is damaged: .*"),
        (b"", r"tokenizer.model is damaged: .*"),
    ],
)
def test_a_vocabulary_that_is_missing_or_damaged_is_reported_in_one_line(
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


@pytest.mark.parametrize("normalizer", [{"type": "Prepend", "prepend": 5}, [1]])
def test_a_damaged_normalizer_is_reported(tmp_path: Path, normalizer: Any) -> None:
    file = byte_level(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": normalizer}))
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        load_tokenizer(tmp_path, kind="decoder-only")
    assert "\n" not in str(caught.value)


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
