"""Prompts: text, token ids and messages become the tokens that the model's tokenizer gives them."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from mlx_specdec import (
    CheckpointError,
    OptionError,
    Options,
    PromptError,
    Request,
    generate,
    load,
    stream_many,
)

from ..support.checkpoints import write_t5
from .support import ROOT, checkpoint

FILES = ROOT / "tests" / "fixtures" / "t5-text"
MESSAGES = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }} {{ m['content'] }}]{% endfor %}"
TEMPLATE += "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
ONE: dict[str, Any] = {"max_tokens": 1, "regular": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(checkpoint(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(checkpoint(tmp_path_factory.mktemp("templated"), template=TEMPLATE))


def ids_of(pair: Any, prompt: Any, **options: Any) -> list[int]:
    """Return the tokens of a prompt but for the first."""
    request = Request(prompt, Options(**ONE, **options), top_logprobs=0, scores_prompt=True)
    first = next(iter(stream_many(pair, [request])))
    assert first.error is None, first.error
    return [position.token for position in first.prompt_logprobs]


@pytest.mark.parametrize(
    ("has_template", "prompt", "options", "text"),
    [
        (False, "hello", {}, "hello"),
        (True, "hello", {"chat_template": False}, "hello"),
        (True, "hello", {}, "[user hello]"),
        (True, MESSAGES * 2, {"chat_template": False}, "[user hello][user hello]"),
        (
            True,
            "hello",
            {"system_prompt": "be brief", "chat_template_config": {"enable_thinking": False}},
            "[system be brief][user hello]False",
        ),
        (True, MESSAGES, {"system_prompt": "be brief"}, "[system be brief][user hello]"),
    ],
)
def test_a_prompt_is_text_or_messages(
    plain: Any, templated: Any, has_template: bool, prompt: Any, options: dict[str, Any], text: str
) -> None:
    pair = templated if has_template else plain
    tokenizer = Tokenizer.from_file(str(Path(pair.name) / "tokenizer.json"))
    # A template writes all special tokens itself, and any other text gets <|start|>.
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    found = ids_of(pair, prompt, **options)
    assert found == (expected[1:] if text.startswith("[") else expected)


def test_a_prompt_is_token_ids(plain: Any) -> None:
    for prompt in ([3, 4, 9], np.array([3, 4, 9])):
        assert ids_of(plain, prompt) == [4, 9]


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        (b"hello", {}, "is bytes"),
        (" ", {}, "is empty"),
        ([], {}, "is empty"),
        (MESSAGES, {}, "no chat template"),
        ([1.5], {}, "a prompt is text"),
        ([{"text": "hello"}], {}, "a prompt is text"),
        ("hello", {"system_prompt": ""}, "this model has none"),
        ("hello", {"chat_template_config": {"a": 1}}, "this model has none"),
        ([3, 4], {"system_prompt": "be brief"}, "token ids take none"),
        (None, {}, "a prompt is text, token ids, or messages"),
        ("a\udcff", {}, "half a character"),
        ("hello", {"system_prompt": "a\ud800"}, "half a character"),
    ],
)
def test_what_is_no_prompt_or_asks_for_a_template_is_refused(
    plain: Any, templated: Any, prompt: Any, options: dict[str, Any], says: str
) -> None:
    pair = templated if options and "none" not in says.replace("take none", "") else plain
    kind = OptionError if "this model has none" in says else PromptError
    with pytest.raises(kind, match=says) as caught:
        generate(pair, prompt, Options(**ONE, **options))
    assert "\n" not in str(caught.value)


# Files of tokenizers


@pytest.mark.parametrize("name", ["codet5", "byt5"])
def test_texts_become_the_ids_of_transformers_and_back(name: str, tmp_path: Path) -> None:
    for file in (FILES / name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = load(write_t5(tmp_path, {"vocab_size": 512}, tokenizer=False)).tokenizer
    known = json.loads((FILES / name / "expected.json").read_text(encoding="utf-8"))
    assert len(known) >= 10
    for text in known:
        if text["text"] is not None:
            assert tokenizer.encode(text["text"]) == text["ids"]
        assert tokenizer.decode(text["ids"]) == text["decoded"]


NOTHING = {"tokenizer.json": None, "tokenizer_config.json": b"{}"}
SPLIT = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tokenizer.json": b'["not this"'}, "tokenizer.json"),
        ({"tokenizer_config.json": b'["not this"'}, "tokenizer_config.json"),
        ({"tokenizer.json": {"normalizer": {"type": "Prepend", "prepend": 5}}}, "is damaged"),
        ({"tokenizer.json": {"normalizer": [1]}}, "is damaged"),
        (NOTHING, "can be read: download its vocabulary, tokenizer.json or tokenizer.model"),
        ({**NOTHING, "tokenizer.model": b"\x0a\xff"}, "tokenizer.model is damaged: "),
        ({**NOTHING, "tokenizer.model": b""}, "tokenizer.model is damaged: "),
        ({"tokenizer.json": {"pre_tokenizer": SPLIT}}, "fails on this text"),
    ],
)
def test_a_damaged_or_missing_file_is_named_in_one_line(
    tmp_path: Path, files: dict[str, Any], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    model = checkpoint(tmp_path)
    for file, content in files.items():
        if content is None:
            (model / file).unlink()
        elif isinstance(content, dict):
            path = model / file
            path.write_text(json.dumps({**json.loads(path.read_text()), **content}))
        else:
            (model / file).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        generate(load(model), "a" * 40 + "b", Options(**ONE))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    if says != "fails on this text":  # the library prints where it gave up
        assert capfd.readouterr() == ("", "")


def test_code_that_comes_with_a_tokenizer_is_not_run_and_no_question_is_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, questions = tmp_path / "ran", list[Any]()
    monkeypatch.setattr(builtins, "input", questions.append)
    model = checkpoint(tmp_path)
    (model / "tokenizer.json").unlink()
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "vocab.json").write_text("{}")
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(CheckpointError, match="no tokenizer that can be read"):
        load(model)
    assert not ran.exists() and questions == []
