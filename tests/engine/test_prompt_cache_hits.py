"""What the prefix cache holds stays as it is, and rows that begin alike use it in a batch."""

from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_specdec.core.options import Options
from mlx_specdec.core.row import Request
from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.scheduler import Scheduler

from ..support.drafter_pairs import made
from ..support.pairs import (
    PROMPT,
    ROOM,
    SYSTEM,
    decoder_only,
    encoder_decoder,
    model_of,
    pair_of,
    run,
)

PAIRS: dict[str, Callable[[Path], Pair]] = {
    "llama": lambda path: decoder_only("llama", 0.2),
    "llama, eagle3": lambda path: made("eagle3", "llama", path),
    "gemma3": lambda path: decoder_only("gemma3", 0.2),
    "t5": lambda path: encoder_decoder("own-head-scaled", 0.1),
}


def make_options(temperature: float, **more: object) -> Options:
    return Options(
        max_tokens=14,
        temperature=temperature,
        seed=3,
        frequency_penalty=1.0,
        cost_cache=False,
        **more,
    )


@pytest.mark.parametrize("name", PAIRS)
def test_nobody_writes_into_what_is_kept(name: str, tmp_path: Path) -> None:
    pair, options, cache = PAIRS[name](tmp_path), make_options(0.0, num_draft=3), PromptCache(ROOM)
    first = run(pair, SYSTEM + PROMPT, options, cache)
    values = [part.value for part in cache._parts]
    arrays = [array for value in values if value is not None for array in value.arrays]
    before = [array.tolist() for array in arrays]
    for tail in ([], [17, 44], [3]):
        run(pair, [*SYSTEM, *PROMPT, *first.tokens[:5], *tail], options, cache)
        run(pair, SYSTEM + PROMPT + tail, options, cache)
    assert [array.tolist() for array in arrays] == before


@pytest.mark.filterwarnings("ignore:mlx-lm's:RuntimeWarning")
def test_a_model_whose_rows_disagree_keeps_nothing() -> None:
    """What it computed of a beginning depends on how many tokens went through each pass."""
    pair, cache = pair_of(model_of("phi3small"), None), PromptCache(ROOM)
    prompts = [SYSTEM + PROMPT, SYSTEM + PROMPT + [17, 44], [*SYSTEM, 3]]
    options = make_options(1.0)
    expected = [generate(pair, prompt, options).tokens for prompt in prompts]
    results = [run(pair, prompt, options, cache) for prompt in prompts]
    many = Scheduler(pair, None, options, BatchSize(2), cache)
    for number, prompt in enumerate(prompts):
        many.add(number, Request(prompt, options))
    results += [part.result for part in many if part.result is not None]
    for result, tokens in zip(results[:3], expected, strict=True):
        assert (result.tokens, result.labels.cached_tokens) == (tokens, 0)
    assert sorted(result.tokens for result in results[3:]) == sorted(expected)
    assert cache.nbytes == 0


@pytest.mark.parametrize("room", [ROOM, 1000])
def test_of_newcomers_that_begin_alike_one_is_prefilled_for_all(room: int) -> None:
    pair, options = decoder_only("llama"), make_options(0.0, regular=True)
    system = [(7 * place) % 60 + 3 for place in range(300)]
    many = Scheduler(pair, None, options, BatchSize(4), PromptCache(room))
    prompts = [[*system, 5], [*system, 5], PROMPT, [*system, 6]]
    for number, prompt in enumerate(prompts):
        many.add(number, Request(prompt, options))
    results = {part.number: part.result for part in many if part.result is not None}
    for number, prompt in enumerate(prompts):
        assert results[number].tokens == generate(pair, prompt, options).tokens
    cached = [results[number].labels.cached_tokens for number in range(4)]
    assert cached == ([0, 300, 0, 300] if room == ROOM else [0, 0, 0, 0])
