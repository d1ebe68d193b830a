from __future__ import annotations

import builtins
import json
from pathlib import Path

import pytest

from mlx_specdec.errors import CheckpointError
from mlx_specdec.text.tokenizer import load_tokenizer


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
