"""A text that was begun from the cache is the text without it, in every family, whoever drafts."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from mlx_specdec.engine.generate import generate
from mlx_specdec.engine.memory import BatchSize
from mlx_specdec.engine.pair import Pair
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.engine.request import Request
from mlx_specdec.engine.scheduler import Scheduler
from mlx_specdec.models.cache_settings import CacheSettings
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.options import Options

from ..support import tiny
from ..support.drafter_pairs import made
from ..support.heads import base_of, some_heads
from ..support.heads import pair_of as with_heads
from ..support.pairs import PROMPT, ROOM, SYSTEM, encoder_decoder, model_of, pair_of, perturbed, run

LENGTH = 14
TRANSLATOR = "own-head-scaled"


def fast_first(fast: Sequence[str], names: Sequence[str]) -> list[object]:
    """Cases, of which only some are fast enough for every day."""
    return [n if n in fast else pytest.param(n, marks=pytest.mark.slow) for n in names]


def decoder(name: str, caches: CacheSettings | None = None, **changes: int) -> Pair:
    draft = DecoderOnlyModel(perturbed(tiny.build(name, **changes), 0.2), caches=caches)
    return pair_of(DecoderOnlyModel(tiny.build(name, **changes), caches=caches), draft)


def mixed(target: str, draft: str) -> Pair:
    return pair_of(DecoderOnlyModel(tiny.build(target)), DecoderOnlyModel(tiny.build(draft)))


CUT, AS_A_WHOLE, SOURCE = "any beginning", "a whole prompt", "the same source"
PAIRS: dict[str, tuple[str, Callable[[Path], Pair]]] = {
    "llama": (CUT, lambda path: decoder("llama")),
    "llama, 8 bits": (CUT, lambda path: decoder("llama", CacheSettings(8, 32), head_dim=32)),
    "llama with a recurrent draft": (CUT, lambda path: mixed("llama", "mamba2")),
    "llama, eagle3": (CUT, lambda path: made("eagle3", "llama", path)),
    "llama, dflash": (CUT, lambda path: made("dflash", "llama", path)),
    "llama, medusa": (
        CUT,
        lambda path: with_heads(base_of("llama"), some_heads(base_of("llama"), True)),
    ),
    "gemma3": (AS_A_WHOLE, lambda path: decoder("gemma3")),
    "mamba2": (AS_A_WHOLE, lambda path: decoder("mamba2")),
    "qwen3_next": (AS_A_WHOLE, lambda path: decoder("qwen3_next")),
    "qwen3_next, eagle3": (AS_A_WHOLE, lambda path: made("eagle3", "qwen3_next", path)),
    "newest 16 tokens": (AS_A_WHOLE, lambda path: decoder("llama", CacheSettings(max_size=16))),
    "t5": (SOURCE, lambda path: encoder_decoder(TRANSLATOR, 0.1)),
    "t5, medusa": (
        SOURCE,
        lambda path: with_heads(base_of(TRANSLATOR), some_heads(base_of(TRANSLATOR), True)),
    ),
}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    made_pairs: dict[str, Pair] = {}

    def pair(name: str) -> Pair:
        if name not in made_pairs:
            made_pairs[name] = PAIRS[name][1](tmp_path_factory.mktemp("drafter"))
        return made_pairs[name]

    return pair


def make_options(temperature: float, **more: object) -> Options:
    return Options(
        max_tokens=LENGTH,
        temperature=temperature,
        seed=3,
        frequency_penalty=1.0,
        cost_cache=False,
        **more,
    )


@pytest.mark.parametrize("name", fast_first(["llama"], ["llama", "llama, eagle3", "gemma3", "t5"]))
def test_nobody_writes_into_what_is_kept(name: str, pairs: Callable[[str], Pair]) -> None:
    pair, options, cache = pairs(name), make_options(0.0, num_draft=3), PromptCache(ROOM)
    first = run(pair, SYSTEM + PROMPT, options, cache)
    arrays = [
        array for node in cache._order for part in node.columns.values() for array in part.arrays
    ]
    arrays += [
        a for n in cache._order for snapshot in n.snapshots.values() for a in snapshot.arrays
    ]
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
def test_of_newcomers_that_begin_alike_one_reads_for_all(
    room: int, pairs: Callable[[str], Pair]
) -> None:
    pair, options = pairs("llama"), make_options(0.0, regular=True)
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
