"""Every method meets every prompt, in turns; what is interrupted or refused loses nothing else."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import PromptError
from mlx_specdec.measure.methods import (
    Method,
    Sample,
    measure,
    own_methods,
)
from mlx_specdec.options import Options
from mlx_specdec.text.prompts import Prompt

from ..support.drafter_pairs import pair_of, target_of
from ..support.pairs import SIZE, Numbers
from ..support.speculators import dflash, eagle3


@dataclass
class Log:
    """Which method ran on which text, in order."""

    runs: list[tuple[str, str]] = field(default_factory=list)
    before: Callable[[str, str], None] = lambda name, text: None

    def method(self, name: str) -> Method:
        def run(prompt: Sequence[int]) -> Sample:
            text = bytes(prompt).decode()
            self.before(name, text)
            self.runs.append((name, text))
            return Sample((1, 2), 2, 0.5, 2, text=f"<{name}>")

        return Method(name, name, 0, True, run)


def encode(text: str) -> list[int]:
    return list(text.encode())


PROMPTS = [Prompt((text,)) for text in ("a", "b", "c")]


def test_methods_take_turns_and_each_comes_first_equally_often() -> None:
    log = Log()
    methods = [log.method(name) for name in ("plain", "x", "y")]
    found = measure(PROMPTS, methods, encode, repeats=2)
    warm, counted = log.runs[:3], log.runs[3:]
    assert warm == [("plain", "a"), ("x", "a"), ("y", "a")]
    groups = [counted[start : start + 3] for start in range(0, len(counted), 3)]
    assert [{text for _, text in group} for group in groups] == [{"a"}, {"b"}, {"c"}] * 2
    assert Counter(group[0][0] for group in groups) == {"plain": 2, "x": 2, "y": 2}
    assert all(len({name for name, _ in group}) == 3 for group in groups)
    keys = {(case, repeat) for case in range(3) for repeat in range(2)}
    assert all(set(found.samples[name]) == keys for name in ("plain", "x", "y"))
    assert not found.interrupted


def test_ctrl_c_keeps_what_was_measured() -> None:
    def stop(name: str, text: str) -> None:
        if (name, text) == ("x", "c"):
            raise KeyboardInterrupt

    log = Log(before=stop)
    found = measure(PROMPTS, [log.method("plain"), log.method("x")], encode, repeats=2)
    assert found.interrupted
    assert set(found.samples["x"]) == {(0, 0), (1, 0)}
    assert {(0, 0), (1, 0)} <= set(found.samples["plain"])


def test_a_prompt_that_a_model_cannot_take_is_skipped_for_all_methods_with_its_reason() -> None:
    def refuse(name: str, text: str) -> None:
        if name == "x" and text == "b":
            raise PromptError("too long")

    log = Log(before=refuse)
    found = measure(PROMPTS, [log.method("plain"), log.method("x")], encode)
    assert found.skipped == {1: "too long"}
    assert {case for samples in found.samples.values() for case, _ in samples} == {0, 2}


def test_later_turns_carry_the_earlier_ones_and_plain_decodings_answers() -> None:
    log = Log()
    prompts = [Prompt(("one", "two", "three"), "talk")]
    found = measure(prompts, [log.method("plain"), log.method("x")], encode, repeats=2)
    second, third = "one\n\n<plain>\n\ntwo", "one\n\n<plain>\n\ntwo\n\n<plain>\n\nthree"
    assert {text for name, text in log.runs if name == "x"} == {"one", second, third}
    assert [(case.turn, case.category) for case in found.cases] == [(n, "talk") for n in range(3)]


# Which methods a benchmark compares, and what they are called.


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
    methods = own_methods([pairs[number] for number in chosen], Options(), proposers, [3])
    assert [method.name for method in methods] == ["plain", *expected]


def test_drafts_of_one_kind_are_distinguished_by_their_names(pairs: list[Pair]) -> None:
    both = [pairs[0], replace(pairs[0], draft_name="other")]
    methods = own_methods(both, Options(), [], [3, "auto"])
    expected = [f"eagle3 {n}, {name}" for name in ("one", "other") for n in (3, "auto")]
    assert [method.name for method in methods[1:]] == [*expected, "auto, one", "auto, other"]
    assert {method.family for method in methods[1:5]} == {"eagle3"}


# What is timed between the texts of a benchmark.
