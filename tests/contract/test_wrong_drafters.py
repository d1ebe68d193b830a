"""A drafter that is hardly ever right is named once, and only if its drafts say so."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, generate, load

from .pairs import hidden_states, model

PROMPT = [5, 9, 12, 7, 33, 21, 8]
OPTIONS = Options(
    max_tokens=26, num_draft=4, frequency_penalty=1, logit_bias={1: -100}, cost_cache=False
)
"""Enough draft tokens to say that a drafter is wrong."""


def warnings_of(call: Callable[[], object]) -> list[str]:
    """Return what a call warns of drafters."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    found = [warning for warning in caught if "hardly any draft tokens" in str(warning.message)]
    assert all(warning.category is RuntimeWarning for warning in found)
    return [str(warning.message) for warning in found]


@pytest.fixture
def wrong(tmp_path: Path) -> Any:
    """A drafter with random weights."""
    return hidden_states("eagle3")(tmp_path)


def test_a_drafter_is_named_once_per_pair(wrong: Any) -> None:
    [line] = warnings_of(lambda: generate(wrong, PROMPT, OPTIONS))
    assert "drafter was probably made for another target" in line and "\n" not in line
    for options in (OPTIONS, replace(OPTIONS, extra_eos_token="40", seed=3)):
        assert warnings_of(lambda options=options: generate(wrong, [4, 5], options)) == []  # type: ignore[misc]


def test_a_draft_model_is_named_without_what_it_cannot_be(tmp_path: Path) -> None:
    target, other = model(tmp_path / "a", "llama"), model(tmp_path / "b", "llama", seed=5)
    [line] = warnings_of(lambda: generate(load(target, other), PROMPT, OPTIONS))
    assert "was probably made for another target" in line and "layers" not in line
    assert warnings_of(lambda: generate(load(target, target), PROMPT, OPTIONS)) == []


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_tokens": 10}, id="few drafts"),
        pytest.param({"temperature": 1.5}, id="hot completions are hard to guess"),
        pytest.param({"regular": True}, id="plain decoding"),
        pytest.param({"proposer": "ngram", "ngram_min": 1}, id="lookup has no target"),
        pytest.param({"regex": "(a|b)*"}, id="a constraint"),
    ],
)
def test_drafts_that_say_nothing_do_not_count(wrong: Any, settings: dict[str, Any]) -> None:
    assert warnings_of(lambda: generate(wrong, PROMPT, replace(OPTIONS, **settings))) == []
    assert len(warnings_of(lambda: generate(wrong, PROMPT, OPTIONS))) == 1
