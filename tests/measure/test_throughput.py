"""Whole files: turns, medians and ratios, and texts that do not depend on the batch size."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from benchmarks.compare import (
    NoBaselineError,
    find_baselines,
    mlx_lm_file_methods,
)
from mlx_specdec.core.options import Options
from mlx_specdec.engine.pair import Pair
from mlx_specdec.errors import PromptError
from mlx_specdec.measure.figures import Analysis, analyse
from mlx_specdec.measure.methods import Method, Prompts, Sample, Texts, file_methods, measure
from mlx_specdec.text.prompts import Prompt

from ..support.pairs import SIZE, decoder_only

GREEDY = Options(max_tokens=8, cost_cache=False)


def encode(text: str) -> list[int]:
    if text == "long":
        raise PromptError("too long")
    return [3]


@dataclass
class Bench:
    """Methods that take chosen times and make chosen texts; log: what ran, in order."""

    seconds: float = 0.0
    log: list[tuple[str, int]] = field(default_factory=list)
    before: Callable[[], None] = lambda: None

    def method(
        self, name: str, size: int, takes: Sequence[float], says: Sequence[int] = (1, 2)
    ) -> Method:
        """takes: by run, the warmup first. says: the tokens of every text."""
        times, rounds = iter(takes), None if name == "transformers" else 1

        def run(prompts: Prompts) -> Texts:
            self.log.append((f"{name} {size}", len(prompts)))
            # Those at the end are complete first.
            for number in reversed(range(len(prompts))):
                self.before()
                yield number, Sample(tuple(says), len(says), 0.0, rounds)
            self.seconds += next(times)

        return Method(f"{name} {size}", name, 0, True, run, size)

    def measure(self, methods: Sequence[Method], **settings: Any) -> Analysis | None:
        prompts = [Prompt((text,)) for text in ("a", "b", "long", "c", "d")]
        clock = lambda: self.seconds  # noqa: E731
        return analyse(measure(prompts, methods, encode, clock=clock, **settings))


def figures() -> Analysis:
    """Plain decoding at 1 and 4, speculation and another program at 4."""
    bench = Bench()
    methods = [
        bench.method("plain", 1, [0, 4, 8, 5]),
        bench.method("plain", 4, [0, 2, 2, 1]),
        bench.method("draft", 4, [0, 1, 1, 2], says=(1, 9)),
        bench.method("transformers", 4, [0, 8, 8, 10]),
    ]
    found = bench.measure(methods)
    assert found is not None
    return found


def test_methods_take_turns_over_the_whole_file() -> None:
    bench = Bench()
    methods = [bench.method("plain", 1, [1] * 3), bench.method("plain", 3, [1] * 3)]
    report: list[tuple[int, int]] = []
    bench.measure(methods, repeats=2, progress=lambda *at: report.append(at))
    warm, counted = bench.log[:2], bench.log[2:]
    assert warm == [("plain 1", 1), ("plain 3", 3)]
    assert counted == [("plain 1", 4), ("plain 3", 4), ("plain 3", 4), ("plain 1", 4)]
    assert [done for done, _ in report] == [*range(21)] and report[-1] == (20, 20)


def test_figures_are_those_of_median_times() -> None:
    found = figures()
    plain, four, draft, _ = found.methods
    # Eight tokens and four texts in 5, 2, 1 and 8 seconds.
    assert [one.tokens_per_second for one in found.methods] == [1.6, 4, 8, 1]
    assert [one.texts_per_second for one in found.methods] == [0.8, 2, 4, 0.5]
    assert (plain.speed_up, plain.over_plain) == (1, None)
    assert (four.speed_up, four.over_plain) == (2.5, None)
    assert (draft.speed_up, draft.over_plain, draft.spread) == (5, 2, (2.5, 8))
    assert (found.texts, found.repeats, found.skipped) == (4, 3, {2: "too long"})
    # Texts that are not those of one at a time are named.
    assert (plain.compared, plain.differences) == (12, ())
    places = [(difference.prompt, difference.position) for difference in draft.differences]
    assert sorted(places) == sorted([(0, 1), (1, 1), (3, 1), (4, 1)] * 3)


def prompts_of(count: int) -> list[list[int]]:
    dice = random.Random(count)
    return [[dice.randrange(3, SIZE) for _ in range(dice.choice([1, 4, 9]))] for _ in range(count)]


def texts_of(method: Method, prompts: Prompts) -> list[tuple[int, ...]]:
    made = dict(method.run(prompts))
    return [made[number].tokens for number in range(len(prompts))]


def baselines(pair: Pair, sizes: Sequence[int]) -> tuple[list[Method], list[str]]:
    """Those that run without torch."""

    def missing(*arguments: Any) -> list[Method]:
        raise NoBaselineError("torch is not installed")

    return find_baselines(mlx_lm_file_methods, missing, pair, GREEDY, sizes)


@pytest.mark.parametrize("eos", [frozenset(), frozenset(range(3, 30))])
def test_mlx_lm_makes_the_same_texts_in_batches(eos: frozenset[int]) -> None:
    pair = decoder_only("llama")
    pair = Pair(**{**vars(pair), "eos_token_ids": eos})
    methods, notes = baselines(pair, [1, 3])
    assert [(one.name, one.batch_size) for one in methods] == [
        ("mlx-lm plain, batch 1", 1),
        ("mlx-lm plain, batch 3", 3),
    ]
    assert notes == ["transformers is left out: torch is not installed"]
    prompts = prompts_of(7)
    expected = texts_of(file_methods(pair, GREEDY, None, "auto", [1])[0][0], prompts)
    assert any(len(text) < 8 for text in expected) == bool(eos)
    assert all(one.same_text and texts_of(one, prompts) == expected for one in methods)
