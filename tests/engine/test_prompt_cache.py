"""What is found is what was kept of these very tokens, within the bound, in memory of its own."""

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_specdec.engine import prompt_cache
from mlx_specdec.engine.prompt_cache import PromptCache
from mlx_specdec.types import TARGET, Cached, Reusable

COLUMN = 2 * 3 * 4 * 2
"""Bytes of two arrays' positions, (1, 2 heads, 1, 3) float32 each."""


def positions_of(text: Sequence[int], lag: int) -> tuple[mx.array, ...]:
    """Column i tells the tokens up to i + lag apart from all others."""
    report = [float(hash(tuple(text[: at + lag + 1])) % 9973) for at in range(len(text) - lag)]
    one = mx.array(report).reshape(1, 1, -1, 1) * mx.ones((1, 2, 1, 3))
    return one, -one


def memory(text: Sequence[int], lag: int = 0, length: int | None = None) -> Reusable:
    """Of the first `length` positions of a text, lazily and with others behind them."""
    arrays = positions_of(text, lag)
    count = arrays[0].shape[2] if length is None else length
    return Reusable(count, lambda a, b: tuple(array[:, :, a:b] for array in arrays), lag)


def keep(cache: PromptCache, text: Sequence[int], **memories: Reusable) -> None:
    """The newest token is unseen."""
    cache.keep(text, [*text, 0], memories)


def holds(state: object, text: Sequence[int], count: int, lag: int = 0) -> bool:
    wanted = positions_of(text[: count + lag], lag)
    return (
        isinstance(state, Cached)
        and not state.is_snapshot
        and state.length == count
        and all(map(mx.array_equal, state.arrays, wanted))
    )


def length(found: dict[str, Cached]) -> int:
    return found[TARGET].length if found else 0


def check(cache: PromptCache) -> None:
    """Bytes are counted exactly and within the limit."""
    values = [part.value for part in cache._parts if part.value is not None]
    assert cache.nbytes == sum(value.nbytes for value in values) <= cache.max_bytes
    assert all(part.value or part.file for part in cache._parts)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "BLOCK_TOKENS", 5)


@pytest.mark.parametrize("seed", range(10))
def test_forced_collisions_and_evictions_never_mix_texts(seed: int) -> None:
    chance = random.Random(seed)
    cache = PromptCache(COLUMN * chance.choice([10, 40, 1000]))
    for _ in range(60):
        text = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        drafted = chance.choice([None, 0, chance.randrange(len(text) + 1)])
        parts = {"target": memory(text)}
        if drafted is not None:
            parts["draft"] = memory(text, length=drafted)
        if chance.random() < 0.7 and len(text) > 1:
            parts["eagle3"] = memory(text, lag=1)
        keep(cache, text, **parts)
        check(cache)
        prompt = [chance.randrange(2) for _ in range(chance.randrange(1, 14))]
        needs = chance.choice([(), ("eagle3",)])
        found = cache.find(prompt, len(prompt) - 1, needs)
        count = length(found)
        if not found:
            continue
        assert holds(found.pop(TARGET), prompt, count)
        assert not needs or found["eagle3"].length == count
        for name, state in found.items():
            assert state.length <= count
            assert holds(state, prompt, state.length, lag=int(name == "eagle3"))
        check(cache)


def test_trees_of_tenants_share_nothing_but_the_bound() -> None:
    cache = PromptCache(3 * 4 * COLUMN)
    for tenant in ("a", "b", "c", "d", "e"):
        found = [length(cache.find([1, 1, 1, 1, 5], 4, (), name)) for name in ("", tenant)]
        assert found == [0, 0]
        assert cache.waits([1] * 300, [1] * 300, tenant)
        cache.keep([1, 1, 1, 1], [1, 1, 1, 1, 0], {"target": memory([1, 1, 1, 1])}, tenant)
        assert length(cache.find([1, 1, 1, 1, 5], 4, (), tenant)) == 4
        check(cache)
    kept = [length(cache.find([1, 1, 1, 1, 5], 4, (), tenant)) for tenant in "abcde"]
    assert kept == [0, 0, 4, 4, 4]
    assert len(cache._following) == 3, "tenants of whom nothing is left take no memory"
