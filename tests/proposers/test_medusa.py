"""Medusa heads from directory to text: which text comes out, and what is refused."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.engine import loading
from mlx_specdec.engine.generate import generate
from mlx_specdec.errors import CheckpointError, SourceError

from ..support import heads
from ..support.heads import base_of, pair_of, some_heads
from ..support.models import make_llama, make_t5
from ..support.pairs import PROMPT


def test_heads_that_know_the_next_words_save_passes() -> None:
    base = base_of("llama")
    right = some_heads(base, own_output=False)
    # Nothing but one token is possible, and heads see it: they have the target's bias.
    pair = pair_of(base, right)
    settings = {"max_tokens": 25, "logit_bias": {9: 1000.0}}
    stats = generate(pair, PROMPT, Options(num_draft=8, **settings)).stats
    assert stats.acceptance_rate == 1.0
    assert stats.rounds == 1 + 24 / 4, "the first token comes with the prompt's pass"


def written(tmp_path: Path, family: str, **settings) -> tuple[Path, Path]:
    """A base and heads for it, side by side."""
    make = make_llama if family == "llama" else make_t5
    (tmp_path / "base").mkdir()
    base = make(tmp_path / "base")
    if settings.pop("own_output", False):
        settings["vocabulary"] = json.loads((base / "config.json").read_text())["vocab_size"]
    return base, heads.write(tmp_path / "heads", "../base", **settings)


@pytest.mark.parametrize("own_output", [True, False])
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_directory_of_heads_loads_its_base_by_itself(
    family: str, own_output: bool, tmp_path: Path
) -> None:
    base, directory = written(tmp_path, family, own_output=own_output, layers=2)
    pair = loading.load(directory)
    settings = {"max_tokens": 12, "seed": 1}
    plain = generate(loading.load(base), "some text", Options(regular=True, **settings))
    result = generate(pair, "some text", Options(**settings))
    assert result.tokens == plain.tokens
    assert (plain.labels.proposer, result.labels.proposer) == ("none", "auto")
    assert result.stats.drafted > 0
    found = mx.load(str(directory / "medusa_lm_head.safetensors"))
    tensors = pair.heads.tensors()
    assert tensors.keys() == found.keys()
    assert all(mx.array_equal(tensors[name], found[name]) for name in found)


def refused(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        loading.load(directory)


def test_heads_for_another_vocabulary_are_refused_by_name(tmp_path: Path) -> None:
    refused(written(tmp_path, "llama", vocabulary=50)[1], "vocabulary of 50, and")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"medusa_num_heads": 4}, r"3\.0\.linear\.bias is missing"),
        ({"medusa_num_layers": 10**9}, "medusa_num_layers"),
        ({"base_model_name_or_path": None}, "no base_model_name_or_path"),
    ],
)
def test_a_config_that_does_not_suit_its_heads_is_refused(
    changes: dict, match: str, tmp_path: Path
) -> None:
    refused(heads.write(tmp_path, "../base", **changes), match)


@pytest.mark.parametrize(
    ("name", "array", "match"),
    [
        ("fc.weight", mx.zeros((32, 32)), r"fc\.weight is not part of the model"),
        ("0.0.linear.weight", mx.zeros((32, 31)), r"0\.0\.linear\.weight has shape \(32, 31\)"),
    ],
)
def test_tensors_that_are_no_heads_are_refused(
    name: str, array: mx.array, match: str, tmp_path: Path
) -> None:
    directory = heads.write(tmp_path, "../base")
    file = str(directory / "medusa_lm_head.safetensors")
    mx.save_safetensors(file, {**heads.tensors(3, 1, 32, None), name: array})
    refused(directory, match)


def test_heads_on_heads_are_refused(tmp_path: Path) -> None:
    heads.write(tmp_path / "base", "elsewhere")
    refused(heads.write(tmp_path / "heads", "../base"), "Medusa heads too")


def test_a_missing_base_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"names a base model that is missing: .*/no-base"):
        loading.load(heads.write(tmp_path / "heads", "../no-base"))
