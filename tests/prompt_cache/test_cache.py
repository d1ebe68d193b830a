"""What is found is what was kept of these very tokens, within the bound, in memory of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import pytest

from mlx_specdec.engine.prompt_cache import BLOCK, PromptCache, common
from mlx_specdec.interfaces.reusable import KVSlice, Reusable, Snapshot

COLUMN = 2 * 3 * 4 * 2
"""Bytes of two arrays' columns, (1, 2 heads, 1, 3) float32 each."""


def columns_of(text: Sequence[int], lag: int) -> tuple[mx.array, ...]:
    """Column i tells the tokens up to i + lag apart from all others."""
    told = [float(hash(tuple(text[: at + lag + 1])) % 9973) for at in range(len(text) - lag)]
    one = mx.array(told).reshape(1, 1, -1, 1) * mx.ones((1, 2, 1, 3))
    return one, -one


def memory(text: Sequence[int], lag: int = 0, length: int | None = None) -> Reusable:
    """Of the first `length` columns of a text, lazily and with others behind them."""
    arrays = columns_of(text, lag)
    count = arrays[0].shape[2] if length is None else length
    return Reusable(count, lambda a, b: tuple(each[:, :, a:b] for each in arrays), lag)


def whole(text: Sequence[int], exact: bool = False) -> Reusable:
    array = columns_of(text, 0)[0]
    value = None if exact else ("made of", tuple(text))
    return Reusable(snapshot=Snapshot(len(text), value, (array,), exact))


def keep(cache: PromptCache, text: Sequence[int], **memories: Reusable) -> None:
    """The newest token is unseen."""
    cache.keep(text, [*text, 0], memories)


def holds(kept: object, text: Sequence[int], count: int, lag: int = 0) -> bool:
    wanted = columns_of(text[: count + lag], lag)
    return (
        isinstance(kept, KVSlice)
        and kept.length == count
        and all(map(mx.array_equal, kept.arrays, wanted))
    )


def check(cache: PromptCache) -> None:
    """Bytes are counted exactly and within the bound, and the oldest node has no children."""
    nodes = list(cache.nodes)
    assert cache.nbytes == sum(node.nbytes for node in nodes) <= cache.max_bytes
    order = {node: place for place, node in enumerate(nodes)}
    assert all(order[child] > order[node] for node in nodes for child in node.children.values())


def test_nothing_stays_of_what_was_kept_in_part() -> None:
    cache, arrays = PromptCache(10**6), columns_of([1, 2, 3, 4], 0)
    keep(cache, [1, 2, 3], target=memory([1, 2, 3]))

    def fails(begin: int, end: int) -> tuple[mx.array, ...]:
        if begin:
            raise MemoryError
        return tuple(each[:, :, begin:end] for each in arrays)

    with pytest.raises(MemoryError):
        keep(cache, [1, 2, 7, 4], target=Reusable(4, fails))
    assert cache.nbytes == 0 and cache.find([1, 2, 3, 4], 3).target is None
    keep(cache, [1, 2, 3], target=memory([1, 2, 3]))
    assert holds(cache.find([1, 2, 3, 4], 3).target, [1, 2, 3], 3)
    check(cache)


def test_the_longest_beginning_is_found_whoever_wrote_it() -> None:
    cache = PromptCache(1 << 20)
    for text in ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2]):
        keep(cache, text, target=memory(text))
    assert cache.nbytes == COLUMN * (6 + 2), "what begins alike is kept once"
    for prompt, count in (
        ([1, 2, 3, 4, 5, 6, 7], 6),
        ([1, 2, 3, 9, 9], 4),
        ([1, 2, 3, 4, 8, 8], 4),
        ([1, 2, 7], 2),
    ):
        known = cache.find(prompt, len(prompt) - 1)
        assert holds(known.target, prompt, count), prompt
        assert known.cached_tokens == count
    assert cache.find([2, 1], 1).target is None
    assert cache.find([1, 2, 3], 0).target is None
    check(cache)


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
        known = cache.find(prompt, len(prompt) - 1, needs)
        count = known.cached_tokens
        if known.target is None:
            continue
        assert holds(known.target, prompt, count)
        assert not needs or known.proposer["eagle3"].length == count
        for name, kept in known.proposer.items():
            assert kept.length <= count
            assert holds(kept, prompt, kept.length, lag=int(name == "eagle3"))
        check(cache)


def test_what_was_used_longest_ago_goes_first() -> None:
    cache = PromptCache(COLUMN * 12)
    for text in ([1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]):
        keep(cache, text, target=memory(text))
    assert cache.find([1, 1, 1, 1, 5], 4).cached_tokens == 4
    keep(cache, [4, 4], target=memory([4, 4]))
    assert cache.find([2, 2, 2, 2, 5], 4).cached_tokens == 0
    for text, count in (([1, 1, 1, 1], 4), ([3, 3, 3, 3], 4), ([4, 4], 2)):
        assert cache.find([*text, 5], len(text)).cached_tokens == count
    too_long = [7] * 13
    keep(cache, too_long, target=memory(too_long))
    assert cache.find([1, 1, 1, 1, 5], 4).cached_tokens == 4, "for what does not fit nothing goes"
    check(cache)


def test_a_drafter_that_needs_its_own_state_bounds_the_hit() -> None:
    cache = PromptCache(1 << 20)
    text = [5, 6, 7, 8, 9]
    keep(cache, text, target=memory(text))
    assert cache.find(text, 3, ["eagle3"]).target is None
    keep(cache, text[:4], target=memory(text[:4]), eagle3=memory(text[:4], lag=1))
    known = cache.find([5, 6, 7, 8, 1, 2], 5, ["eagle3"])
    assert known.cached_tokens == 3, "its column 3 was made of the token at place 4 as well"
    assert holds(known.proposer["eagle3"], text, 3, lag=1)
    check(cache)


def test_what_cannot_be_cut_is_found_whole_or_not_at_all() -> None:
    cache = PromptCache(1 << 20)
    for text in ([1, 2], [1, 2, 3, 4]):
        keep(cache, text, target=whole(text))
    for prompt, count in (([1, 2, 3, 4, 5], 4), ([1, 2, 3, 4], 2), ([1, 2, 3, 9, 9], 2), ([1], 0)):
        known = cache.find(prompt, len(prompt) - 1)
        assert known.cached_tokens == count, prompt
        assert not count or known.target.value == ("made of", tuple(prompt[:count]))
    source = [7, 8, 9]
    keep(cache, source, target=whole(source, exact=True), draft=whole(source, exact=True))
    known = cache.find(source, 0)
    assert (known.cached_tokens, known.proposer["draft"].length) == (3, 3)
    assert cache.find([7, 8, 9, 1], 0).target is None, "an encoder looks both ways"
    check(cache)


def test_what_is_kept_takes_what_is_counted() -> None:
    cache = PromptCache(1 << 30)
    mx.clear_cache()
    before = mx.get_active_memory()
    keep_rows(cache, mx.zeros((3, 8, 512, 32)) + 1)
    column = 8 * 32 * 4
    assert cache.nbytes == column * (100 + 150 + 300)
    taken = mx.get_active_memory() - before
    assert cache.nbytes <= taken <= cache.nbytes + 64 * 1024


def keep_rows(cache: PromptCache, batch: mx.array) -> None:
    """Rows of one buffer, which is given back afterwards."""
    for row, text in enumerate(([1] * 100, [2] * 50 + [3] * 100, [4] * 300)):
        views = Reusable(len(text), lambda a, b, row=row: (batch[row : row + 1, :, a:b],))
        keep(cache, text, target=views)


@pytest.mark.parametrize("begin", [0, 1, BLOCK])
@pytest.mark.parametrize("length", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_what_texts_have_in_common_is_counted_across_blocks(length: int, begin: int) -> None:
    tokens = list(range(length))
    text = [-1] * begin + tokens
    assert common(tokens, text, begin) == length
    assert common([*tokens, -2], [*text, -3], begin) == length
    assert common(tokens, text[: begin + length // 2], begin) == length // 2
    assert common(tokens, tuple(text), begin) == length
    assert common(tokens, text, len(text) + 1) == 0
