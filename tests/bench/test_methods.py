"""Which methods a benchmark compares, and what they are called."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import OptionError
from mlx_specdec.measure.methods import own_methods
from mlx_specdec.options import Options

from ..support.drafter_pairs import pair_of, target_of
from ..support.pairs import SIZE, Numbers
from ..support.speculators import dflash, eagle3


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """One target with two drafters of different kinds, and with a draft model."""
    place: Path = tmp_path_factory.mktemp("drafters")
    target = target_of("llama")
    plain = Pair("target", "a draft", target, target, Numbers(), frozenset(), SIZE, "float32", 0.0)
    made = [
        replace(pair_of(target, directory), draft_name=directory.name)
        for directory in (eagle3(place / "one"), dflash(place / "block", markov="gated"))
    ]
    return [*made, plain]


@pytest.mark.parametrize(
    ("chosen", "proposers", "expected"),
    [
        ((0,), [], ["eagle3 3"]),
        ((0, 1, 2), [], ["eagle3 3", "dspark 3", "draft 3"]),
        ((0, 1, 2), ["draft", "dspark", "ngram"], ["draft 3", "dspark 3", "ngram 3"]),
        ((0, 2), ["auto"], ["auto 3, one", "auto 3, a draft"]),
    ],
)
def test_every_draft_is_measured_and_what_needs_none_once(
    chosen: tuple[int, ...], proposers: list[str], expected: list[str], pairs: list[Pair]
) -> None:
    methods = own_methods([pairs[each] for each in chosen], Options(), proposers, [3])
    assert [method.name for method in methods] == ["plain", *expected]


def test_drafts_of_one_kind_are_told_apart_by_their_names(pairs: list[Pair]) -> None:
    both = [pairs[0], replace(pairs[0], draft_name="other")]
    methods = own_methods(both, Options(), [], [3, "auto"])
    expected = [f"eagle3 {n}, {name}" for name in ("one", "other") for n in (3, "auto")]
    assert [method.name for method in methods[1:]] == [*expected, "auto, one", "auto, other"]
    assert {method.family for method in methods[1:5]} == {"eagle3"}


def test_a_proposer_that_no_pair_has_is_refused(pairs: list[Pair]) -> None:
    with pytest.raises(OptionError, match="no such drafter"):
        own_methods(pairs, Options(), ["draft", "dflash"], [3])
