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
