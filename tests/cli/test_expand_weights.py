"""One line says what was chosen for quantized weights on a CPU, and a flag chooses otherwise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlx_specdec.models import number_format

from ..support.commands import Run

MODEL = Path(__file__).parents[2] / "weights" / "py-llama-draft"
ASKED = ("generate", "def f(x):", "--model", MODEL, "-m", 2, "--no-cache", "--regular-decode")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "its quantized weights are expanded to 7.1 MB, which is faster on a CPU"),
        (("--expand-weights",), "expanded to 7.1 MB"),
        (("--no-expand-weights",), "stay quantized"),
    ],
    ids=["auto", "expanded", "quantized"],
)
def test_one_line_says_what_was_chosen(
    flags: tuple[str, ...], line: str, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not number_format.on_cpu():
        pytest.skip("weights are expanded on CPUs")
    assert "py-llama-draft: " not in run(*ASKED, *flags).err
    monkeypatch.setattr(number_format, "TOLD_ABOVE", 1)
    done = run(*ASKED, *flags)
    assert done.code == 0
    [told] = [each for each in done.err.splitlines() if each.startswith("py-llama-draft: ")]
    assert line in told
    assert run(*ASKED, *flags, "--quiet").err == ""
    assert json.loads(run(*ASKED, *flags, "--json").out)["text"]
