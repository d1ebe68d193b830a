"""config.json with numbers that no model has: one line, at once, whoever reads it.

One case a message; `tests/checkpoints/test_keys.py` and `test_configuration.py` have the values.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ..support.commands import Outcome, Run


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


@pytest.mark.parametrize(
    ("family", "key", "value", "says"),
    [
        ("llama", "vocab_size", 0, "vocab_size 0: need a whole number"),
        ("llama", "hidden_size", "10 ** 4000", "of more than 40 digits"),
        ("llama", "hidden_size", 10**30, "hidden_size"),
        ("llama", "hidden_size", "4", "does not describe a model"),
        ("llama", "vocab_size", None, "does not describe a model"),
        ("llama", "num_hidden_layers", 10**9, "asks for 1000000000 layers"),
        ("llama", "vocab_size", 1000, "has shape"),
        ("llama", "rope_theta", float("nan"), "rope_theta nan: need a number above 0"),
        ("t5", "d_model", -1, "needs d_model, a whole number above 0, not -1"),
        ("t5", "d_model", "10 ** 4000", "not one so large"),
        ("t5", "num_decoder_layers", 10**9, "asks for 1000000000 layers"),
        ("t5", "num_layers", [], "needs num_layers"),
        ("t5", "d_model", 1000, "where config.json asks for"),
    ],
)
def test_sizes_that_cannot_be(
    run: Run,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    family: str,
    key: str,
    value: Any,
    says: str,
) -> None:
    source = changed(request.getfixturevalue(family), tmp_path / "m", key, value)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done, says), done.err
    assert not (tmp_path / "out").exists()
    shown = run("inspect", source)
    assert shown.code == 0 and "Not convertible" in shown.out
    assert is_told(run("generate", "x", "-m", 1, "--model", source))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", float("nan")),
        ("eos_token_id", {"a": 1}),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_scaling", {"rope_type": "linear", "factor": "x"}),
        ("rope_theta", None),
        ("num_key_value_heads", 0),
        ("head_dim", -8),
    ],
)
def test_what_a_llama_cannot_have(
    run: Run, llama: Path, tmp_path: Path, key: str, value: Any
) -> None:
    source = changed(llama, tmp_path / "m", key, value)
    assert is_told(run("generate", "def f", "-m", 1, "--model", source))


@pytest.mark.parametrize(("kind", "depth"), [("t5", 51), ("llama", 100_000)])
def test_a_configuration_that_nests_without_end(
    run: Run, kind: str, depth: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    source = changed(request.getfixturevalue(kind), tmp_path / "m", "deep", "here")
    text = (source / "config.json").read_text()
    nested = "[" * depth + "]" * depth
    (source / "config.json").write_text(text.replace('"here"', nested))
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert is_told(done, "config.json"), done.err


@pytest.mark.parametrize(("part", "value"), [("bits", 4.0), ("group_size", None)])
def test_quantizations_of_a_t5_that_cannot_be(
    run: Run, t5: Path, tmp_path: Path, part: str, value: Any
) -> None:
    entry = {"bits": 4, "group_size": 64, part: value}
    source = changed(t5, tmp_path / "m", "quantization", entry)
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out", "--dequantize")
    assert is_told(done, "not a quantization that MLX has"), done.err
    assert is_told(run("generate", "Les", "-m", 1, "--model", source))
