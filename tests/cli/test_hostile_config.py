"""config.json with numbers that no model has: one line, at once, whoever reads it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from .conftest import Outcome, Run

SIZES = [None, 0, -1, 10**9, 2**31, 10**30, "10 ** 4000", 1.5, float("nan"), True, "4", [], {}]


def changed(source: Path, directory: Path, key: str, value: Any) -> Path:
    """A copy of a model whose config.json says something else."""
    shutil.copytree(source, directory)
    config = json.loads((directory / "config.json").read_text())
    text = json.dumps({**config, key: value})
    # Python writes no number of so many digits, and reads none.
    text = text.replace('"10 ** 4000"', "1" + "0" * 4000)
    (directory / "config.json").write_text(text)
    return directory


def is_told(outcome: Outcome, *parts: str) -> bool:
    """One short line, and nothing else."""
    line = outcome.err
    whole = line.startswith("error: ") and line.count("\n") == 1 and len(line) < 500
    return outcome.code == 2 and outcome.out == "" and whole and all(p in line for p in parts)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", SIZES)
def test_sizes_of_a_llama_that_cannot_be(
    run: Run, llama: Path, tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(llama, tmp_path / "m", key, value)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done), done.err
    assert not (tmp_path / "out").exists()
    shown = run("inspect", source)
    assert shown.code == 0 and "Not convertible" in shown.out


@pytest.mark.parametrize("key", ["vocab_size", "d_model", "num_layers", "num_decoder_layers"])
@pytest.mark.parametrize("value", [0, *SIZES[2:]])
def test_sizes_of_a_t5_that_cannot_be(
    run: Run, t5: Path, tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(t5, tmp_path / "m", key, value)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done, key) or is_told(done, "asks for"), done.err
    shown = run("inspect", source)
    assert shown.code == 0 and "Not convertible" in shown.out


@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [None, 0, -1, float("nan"), float("inf"), "1", [], 10**60])
def test_factors_of_a_llama_that_cannot_be(
    run: Run, llama: Path, tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(llama, tmp_path / "m", key, value)
    for command in (("generate", "def f", "-m", 1), ("convert", "--mlx-path", tmp_path / "out")):
        done = run(*command, "--model", source)
        assert is_told(done, key) or value == 10**60, done.err


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", float("nan")),
        ("eos_token_id", "x"),
        ("eos_token_id", {"a": 1}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}),
        ("num_key_value_heads", 0),
        ("head_dim", -8),
    ],
)
def test_what_a_llama_cannot_have(
    run: Run, llama: Path, tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(llama, tmp_path / "m", key, value)
    assert is_told(run("generate", "def f", "-m", 1, "--model", source))


@pytest.mark.parametrize("kind", ["t5", "llama"])
@pytest.mark.parametrize("depth", [51, 900, 100_000])
def test_a_configuration_that_nests_without_end(
    run: Run, kind: str, depth: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = changed(request.getfixturevalue(kind), tmp_path / "m", "deep", "here")
    text = (source / "config.json").read_text()
    nested = "[" * depth + "]" * depth
    (source / "config.json").write_text(text.replace('"here"', nested))
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done, "config.json"), done.err


@pytest.mark.parametrize("value", [4.0, True, 10**9, None, "4"])
@pytest.mark.parametrize("part", ["bits", "group_size"])
def test_packings_of_a_t5_that_cannot_be(
    run: Run, t5: Path, tmp_path: Path, part: str, value: Sequence[Any]
) -> None:
    entry = {"bits": 4, "group_size": 64, part: value}
    source = changed(t5, tmp_path / "m", "quantization", entry)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out", "--dequantize")
    assert is_told(done), done.err
    assert is_told(run("generate", "Les", "-m", 1, "--model", source))
