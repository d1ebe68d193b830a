"""On one machine nothing of the ranks is called; where a target is led, the script sees it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_specdec import Options, load

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import measure_sharing as script

from .ranks import loopback


def test_what_is_not_shared_calls_nothing_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loopback.write("llama", tmp_path / "model", eos_token_id=999)
    pair = load(model, model)
    options = Options(max_tokens=6, num_draft=2, cost_cache=False)
    monkeypatch.setattr(script, "PROMPT", loopback.PROMPT)
    assert script.calls(pair, options) == 0
    _, rounds, _ = script.written(pair, options)
    # A draft step or a pass looks twice at most.
    assert rounds <= script.looks(pair, options) < 12 * rounds
    led = script.led_to_nobody(pair)
    assert script.calls(led, options) > rounds
    assert script.written(led, options)[0] == script.written(pair, options)[0]
