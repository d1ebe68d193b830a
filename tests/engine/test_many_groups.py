"""Sequences of unlike lengths neither wait for one another nor share a rectangle of memory."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate_many
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.types import Scores

from ..support.pairs import SIZE, decoder_only

CHUNK = 32
LONG = [(7 * place) % (SIZE - 3) + 3 for place in range(1100)]


@pytest.fixture(scope="module")
def pair() -> Pair:
    return decoder_only("llama")


@pytest.fixture
def passes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(rows, width) of the target's passes."""
    seen: list[tuple[int, int]] = []
    run = type(pair.target).run

    def counted(self, tokens, entries, hidden=()) -> Scores:
        if self is pair.target:
            seen.append(tokens.shape)
        return run(self, tokens, entries, hidden)

    assert pair.target.rows_agree and not pair.target.why_not_batched, "the trials are over"
    monkeypatch.setattr(type(pair.target), "run", counted)
    yield seen


def options(**settings) -> Options:
    return Options(
        **{
            "max_tokens": 12,
            "regular": True,
            "cost_cache": False,
            "prefill_step_size": CHUNK,
            **settings,
        }
    )


def live(pair: Pair, cache: PromptCache | None = None) -> Scheduler:
    return Scheduler(pair, None, options(), BatchSize(16), cache)


def test_prompts_of_like_length_are_read_and_decoded_in_one_rectangle(
    pair: Pair, passes: list[tuple[int, int]]
) -> None:
    prompts = [LONG[number : number + 40 + number] for number in range(8)]
    generate_many(pair, prompts, options(prefill_step_size=64), batch_size=8)
    assert {rows for rows, _ in passes} == {8}
    assert [width for _, width in passes if width > 1] == [46]


def test_a_prompt_that_begins_as_one_that_is_being_read_waits_for_it_and_others_do_not(
    pair: Pair,
) -> None:
    run = live(pair, PromptCache(1 << 24))
    run.add(0, Request(LONG, options()))
    for _ in range(3):
        run.step()
    run.add(1, Request([*LONG, 5], options()))
    run.add(2, Request([5, 9, 11], options()))
    results = {part.number: part.result for part in run if part.result is not None}
    assert [results[number].labels.cached_tokens for number in range(3)] == [0, len(LONG) - 1, 0]


def test_rows_that_have_ended_are_not_held_by_those_that_waited_for_them(pair: Pair) -> None:
    run = live(pair, PromptCache(1))
    rows = []
    for number, most in enumerate([1, 1, 60]):
        run.add(number, Request(LONG, options(max_tokens=most)))
        rows.append(weakref.ref(list(run._rows)[-1]))
        run.step()
        assert len(run.waiting) == (number > 0)
        while run.waiting or len(run._rows) > 1:
            run.step()
    gc.collect()
    assert rows[0]() is None and rows[2]() is not None
