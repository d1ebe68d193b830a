"""Contexts over every family, fed and rewound at random, against plain decoding token by token.

Texts are random and forced, so a schedule never depends on a near tie. All are several windows
long. Helpers hold the logits of plain decoding, one row a token, as the only truth.
"""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_specdec.errors import RewindError
from mlx_specdec.interfaces import Context
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.rewinding import RewindableCache

from ..support import tiny
from ..support.pairs import read

LENGTH = 4 * tiny.WINDOW + 5
LONG = 370
"""Past the 256 rows by which caches of mlx-lm grow."""
PROMPT = 5
FAMILIES = sorted(tiny.CONFIGS)
QUICK = ("llama", "gemma3", "gpt_oss", "mamba2", "falcon_h1", "llama4")
"""One of each kind of cache, and of each mixture of kinds."""
RECURRENT = {"mamba2", "qwen3_next", "falcon_h1", "recurrent_gemma", "lfm2", "llama4"}
OTHER_CACHES = sorted({*QUICK, *RECURRENT, "llama_sliding"})
"""All others have llama's."""


@functools.cache
def model_of(family: str) -> DecoderOnlyModel:
    return DecoderOnlyModel(tiny.build(family), 4096)


@functools.cache
def text_of(family: str) -> tuple[int, ...]:
    return tuple(random.Random(family).choices(range(tiny.VOCABULARY), k=LONG))


@functools.cache
def plain_logits(family: str, length: int) -> np.ndarray:
    """Row i: logits after token i, from passes of one token through mlx-lm alone."""
    module = tiny.build(family)
    caches = make_prompt_cache(module)
    rows = [
        np.array(module(mx.array([[token]]), cache=caches)[0, -1])
        for token in text_of(family)[:length]
    ]
    return np.stack(rows)


def agree(family: str, start: int, logits: mx.array) -> None:
    got = np.array(logits[0])
    end = start + len(got)
    want = plain_logits(family, LENGTH if end <= LENGTH else LONG)[start:end]
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)
    assert (got.argmax(-1) == want.argmax(-1)).all()


def tokens_of(family: str, start: int, end: int, wrong: random.Random | None = None) -> mx.array:
    """The text's tokens start .. end - 1; from `wrong`, others of the same number."""
    right = text_of(family)[start:end]
    if wrong is not None:
        right = tuple(wrong.choices(range(tiny.VOCABULARY), k=end - start))
    return mx.array([right], dtype=mx.int32)


def opened(family: str) -> Context:
    return read(model_of(family), text_of(family)[: PROMPT + 1])


def target_rounds(family: str, choose: random.Random, length: int = LENGTH) -> int:
    """Rounds as a target sees them: committed tokens, then a proposal of which a part is kept."""
    context = opened(family)
    rounds = 0
    while context.lengths[0] < length - 8:
        seen = context.lengths[0]
        committed, proposed = choose.choice([1, 1, 1, 2, 3]), choose.randint(0, 5)
        kept = choose.randint(0, proposed)
        right = seen + committed + kept
        fed = mx.concatenate(
            [
                tokens_of(family, seen, right),
                tokens_of(family, 0, proposed - kept, wrong=choose),
            ],
            axis=1,
        )
        logits = context.advance(fed, proposed=proposed).logits
        agree(family, seen, logits[:, : committed + kept])
        context.rewind((right,))
        assert context.lengths == (right,)
        rounds += 1
    return rounds


def draft_rounds(family: str, choose: random.Random, length: int = LENGTH) -> int:
    """Rounds as a draft sees them: unseen tokens at once, then one proposed token a pass."""
    context = opened(family)
    rounds = 0
    while context.lengths[0] < length - 8:
        seen = context.lengths[0]
        first = choose.choice([1, 1, 2, 4])
        agree(family, seen, context.advance(tokens_of(family, seen, seen + first)).logits)
        count = choose.randint(0, 5)
        kept = choose.randint(0, count)
        for index in range(count):
            at = seen + first + index
            wrong = choose if index >= kept else None
            logits = context.advance(tokens_of(family, at, at + 1, wrong), proposed=1).logits
            if index < kept:
                agree(family, at, logits)
        context.rewind((seen + first + kept,))
        assert context.lengths == (seen + first + kept,)
        rounds += 1
    return rounds


def whole_passes(family: str, choose: random.Random, length: int = LENGTH) -> int:
    """Passes of any size that are proposed as a whole, several before one rewind."""
    context = opened(family)
    rounds = 0
    while context.lengths[0] < length - 13:
        start = context.lengths[0]
        agree(family, start, context.advance(tokens_of(family, start, start + 1)).logits)
        sizes = [choose.randint(1, 4) for _ in range(choose.randint(1, 3))]
        for size in sizes:
            seen = context.lengths[0]
            fed = tokens_of(family, seen, seen + size)
            agree(family, seen, context.advance(fed, proposed=size).logits)
        context.rewind((start + 1 + choose.randint(0, sum(sizes)),))
        rounds += 1
    return rounds


SCHEDULES = [target_rounds, draft_rounds, whole_passes]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "family",
    [f if f in QUICK else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES],
)
def test_any_rewinding_gives_the_logits_of_plain_decoding(
    family: str, schedule: Callable[[str, random.Random], int]
) -> None:
    for seed in range(2):
        assert schedule(family, random.Random(seed)) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule"),
    [(f, target_rounds) for f in OTHER_CACHES] + [(f, draft_rounds) for f in QUICK],
)
def test_over_a_hundred_rounds_in_one_text_give_the_logits_of_plain_decoding(
    family: str, schedule: Callable[[str, random.Random, int], int]
) -> None:
    assert schedule(family, random.Random(7), LONG) > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_only_models_with_opaque_state_say_that_they_replay(family: str) -> None:
    assert opened(family).replays == (family in RECURRENT)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_never_copies_a_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_of(family), plain_logits(family, LENGTH)  # making models copies their configurations
    monkeypatch.setattr(copy, "deepcopy", _refuse)
    context = opened(family)
    for at in range(PROMPT, LENGTH):
        agree(family, at, context.advance(tokens_of(family, at, at + 1)).logits)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "llama_sliding"])
def test_verifying_in_one_pass_never_copies_a_window(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_of(family), plain_logits(family, LENGTH)  # making models copies their configurations
    monkeypatch.setattr(copy, "deepcopy", _refuse)
    assert target_rounds(family, random.Random(1)) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_draft_passes_are_undone_without_another_pass(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = opened(family)
    for at in range(PROMPT, 3 * tiny.WINDOW):
        context.advance(tokens_of(family, at, at + 1), proposed=int(at > 2 * tiny.WINDOW))
    monkeypatch.setattr(DecoderOnlyModel, "run", _refuse)
    context.rewind((2 * tiny.WINDOW + 3,))
    assert context.lengths == (2 * tiny.WINDOW + 3,)


def _refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("this must not be called here")


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba2", "qwen3_next"])
def test_final_and_future_tokens_cannot_be_rewound(family: str) -> None:
    context = opened(family)
    context.advance(tokens_of(family, PROMPT, PROMPT + 6), proposed=3)
    for lengths in ((PROMPT + 2,), (PROMPT + 7,), (0,), (-1,), (), (PROMPT + 4, PROMPT + 4)):
        with pytest.raises(RewindError):
            context.rewind(lengths)
    context.rewind((PROMPT + 4,))
    with pytest.raises(RewindError, match="final"):
        context.rewind((PROMPT + 3,))
    context.advance(tokens_of(family, PROMPT + 4, PROMPT + 5))
    with pytest.raises(RewindError, match="final"):
        context.rewind((PROMPT + 4,))
    context.rewind((PROMPT + 5,))
    agree(family, PROMPT + 5, context.advance(tokens_of(family, PROMPT + 5, PROMPT + 6)).logits)


def test_a_cache_that_does_not_trim_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    context = opened("gemma3")
    context.advance(tokens_of("gemma3", PROMPT, PROMPT + 4), proposed=3)
    monkeypatch.setattr(KVCache, "trim", lambda self, n: 0)
    with pytest.raises(RewindError, match=r"KVCache.* holds 9 tokens after a rewind to 7"):
        context.rewind((PROMPT + 2,))


class Silent(KVCache):
    """An unknown class that claims to trim and does not."""

    def trim(self, n: int) -> int:
        return n


def test_unknown_classes_are_copied_whatever_they_claim() -> None:
    cache = RewindableCache([Silent(), KVCache()])
    assert cache.replays
    _feed(cache, 3)
    _feed(cache, 3, proposed=2)
    assert cache.rewind(5) == 3
    assert [entry.offset for entry in cache.entries] == [3, 3]


def test_nested_caches_are_restored_in_place() -> None:
    pair = CacheList(ArraysCache(size=1), KVCache())
    cache = RewindableCache([pair, KVCache()])
    _feed(cache, 2)
    _feed(cache, 3, proposed=3)
    assert cache.rewind(2) == 2
    assert cache.entries[0] is pair
    assert pair[0][0].item() == 2
    assert (pair[1].offset, cache.entries[1].offset) == (2, 2)


def test_quantized_caches_are_cut_by_counting() -> None:
    cache = RewindableCache([QuantizedKVCache(group_size=32)])
    _feed(cache, 5, proposed=4)
    assert not cache.replays
    assert cache.rewind(2) == 2
    assert cache.entries[0].offset == 2


def test_every_cut_of_a_window_leaves_what_plain_decoding_has() -> None:
    """All fillings and cuts of a window of four: the next token sees exactly the last four."""
    for size in range(1, 10):
        for rows in range(1, 7):
            for cut in range(rows + 1):
                cache = RewindableCache([RotatingKVCache(max_size=4)])
                _feed(cache, size)
                _feed(cache, rows, proposed=rows if cut == rows else cut)
                assert cache.rewind(size + rows - cut) in (size, size + rows - cut)
                end = cache.length
                for at in range(end, end + 6):
                    seen = sorted(_feed(cache, 1)[0])
                    assert seen == list(range(max(0, at - 3), at + 1)), (size, rows, cut)


@pytest.mark.parametrize("size", [3, 16, 300])
def test_any_rewinding_of_a_window_leaves_what_plain_decoding_has(size: int) -> None:
    """300 is past mlx-lm's growth step of 256: the buffer grows before it turns."""
    choose = random.Random(size)
    cache = RewindableCache([RotatingKVCache(max_size=size)])
    while cache.length < 3 * size:
        rows = choose.randint(1, 9)
        proposed = choose.randint(0, rows)
        settings = cache.length + rows - choose.randint(0, proposed)
        _feed(cache, rows, proposed)
        reached = cache.rewind(settings)
        assert reached == settings or proposed == rows
        probe = copy.deepcopy(cache)
        seen = sorted(_feed(probe, 1)[0])
        assert seen == list(range(max(0, reached + 1 - size), reached + 1))


def test_a_window_cannot_lose_more_than_it_can_refill() -> None:
    for rows in range(1, 6):
        cache = RewindableCache([RotatingKVCache(max_size=4)])
        _feed(cache, 6)
        _feed(cache, rows, proposed=rows - 1)
        with pytest.raises(RewindError, match="no copy was kept"):
            cache.rewind(6)


def test_a_final_pass_gives_up_the_way_back() -> None:
    cache = RewindableCache([ArraysCache(size=1)])
    _feed(cache, 2)
    _feed(cache, 3, proposed=3)
    _feed(cache, 1)
    with pytest.raises(RewindError, match="no copy was kept"):
        cache.rewind(5)


def _feed(cache: RewindableCache, rows: int, proposed: int = 0) -> list[list[int]]:
    """Writes each token's position as its key, or the length in recurrent state; returns what
    attention would read."""
    start = cache.length
    cache.before_pass(rows, proposed)
    return [read for entry in cache.entries for read in _write(entry, start, rows)]


def _write(entry: Any, start: int, rows: int) -> list[list[int]]:
    if isinstance(entry, CacheList):
        return [read for part in entry.caches for read in _write(part, start, rows)]
    if isinstance(entry, ArraysCache):
        entry[0] = mx.array(start + rows)
        return []
    position = mx.arange(start, start + rows, dtype=mx.float32)[None, None, :, None]
    keys = mx.broadcast_to(position, (1, 1, rows, 32))
    read, _ = entry.update_and_fetch(keys, keys)
    if isinstance(entry, QuantizedKVCache):
        return []
    return [[int(value) for value in read[0, 0, :, 0].tolist()]]
