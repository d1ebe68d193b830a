"""Prompts begin with the one prefix that a target's config.json asks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.engine.loading import load
from mlx_specdec.engine.request import encode
from mlx_specdec.models.loading import task_prefix
from mlx_specdec.options import Options

from ..support.commands import Run

SETTINGS = "translate: "
WEIGHTS = Path(__file__).parents[2] / "weights"


@pytest.fixture
def prefixed(t5: Path, tmp_path: Path) -> Path:
    """A T5 whose config.json asks for a prefix."""
    made = shutil.copytree(t5, tmp_path / "prefixed")
    config = json.loads((made / "config.json").read_text(encoding="utf-8"))
    config["task_specific_params"] = {"translation": {"prefix": SETTINGS, "num_beams": 4}}
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


@pytest.mark.parametrize(
    ("tasks", "prefix"),
    [
        ({"a": {"prefix": "x: "}}, "x: "),
        ({"a": {"prefix": "x: "}, "b": {"prefix": "x: "}, "c": {}}, "x: "),
        ({"a": {"prefix": "x: "}, "b": {"prefix": "y: "}}, ""),
        ({"a": {"prefix": "  "}, "b": {"prefix": None}, "c": 3}, ""),
        ({}, ""),
        (None, ""),
        (["x: "], ""),
        ({"a": {"prefix": ["x: "]}}, ""),
    ],
)
def test_only_a_single_prefix_counts(tasks: Any, prefix: str) -> None:
    assert task_prefix({"task_specific_params": tasks}) == prefix


def test_a_prompt_gets_the_prefix_unless_it_has_it_or_is_to_stay(prefixed: Path) -> None:
    pair = load(prefixed)
    with_prefix = pair.tokenizer.encode(f"{SETTINGS}Les pates")
    assert encode(pair, "Les pates", Options()) == with_prefix
    assert encode(pair, f"{SETTINGS}Les pates", Options()) == with_prefix
    for prompt, options in (("translate:Les", Options()), ("Les", Options(chat_template=False))):
        assert encode(pair, prompt, options) == pair.tokenizer.encode(prompt)
    assert encode(pair, [5, 6], Options()) == [5, 6]


def test_generate_says_that_it_added_the_prefix(run: Run, prefixed: Path) -> None:
    arguments = ("--model", prefixed, "-m", 9)
    done, whole = (run("generate", text, *arguments) for text in ("Les", f"{SETTINGS}Les"))
    assert done.err.startswith(f'"{SETTINGS}" was put before the prompt') and done.out == whole.out
    assert "was put before" not in whole.err
    assert run("generate", "Les", *arguments, "--quiet").err == ""
