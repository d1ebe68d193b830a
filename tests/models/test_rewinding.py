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
from mlx_lm.models.cache import ArraysCache, CacheList, make_prompt_cache

from mlx_specdec.errors import RewindError
from mlx_specdec.models.mlx_lm.caches import BatchedCache, WindowCache
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel
from mlx_specdec.models.mlx_lm.states import States
from mlx_specdec.models.rows import DROP, Rows
from mlx_specdec.types import Context

from ..support import tiny
from ..support.pairs import read

LENGTH = 4 * tiny.WINDOW + 5
LONG = 370
"""Past the 256 rows by which caches of mlx-lm grow."""
PROMPT = 5
FAMILIES = sorted(tiny.CONFIGS)
QUICK = ("llama", "gemma3", "gpt_oss", "mamba2", "falcon_h1", "llama4")
"""One of each kind of cache, and of each mixture of kinds."""


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
    assert schedule(family, random.Random(0)) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "schedule"),
    [
        *((f, target_rounds) for f in ("llama", "gemma3", "mamba2", "llama4")),
        *((f, draft_rounds) for f in ("llama", "mamba2")),
    ],
)
def test_over_a_hundred_rounds_in_one_text_give_the_logits_of_plain_decoding(
    family: str, schedule: Callable[[str, random.Random, int], int]
) -> None:
    assert schedule(family, random.Random(7), LONG) > 100


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_never_copies_a_cache(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context, _ = opened(family), plain_logits(family, LENGTH)  # to open one copies empty caches
    monkeypatch.setattr(copy, "deepcopy", _refuse)
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


class Recorded:
    """Windowed caches of several sequences, whose keys are the positions of tokens."""

    def __init__(self, size: int, count: int = 1) -> None:
        self.rows = Rows(count)
        self.cache = WindowCache(self.rows, self.rows.window(size))
        self.size = size

    def feed(self, rows: int, proposed: int = 0) -> None:
        """Append tokens, and compare what each row sees with the newest positions."""
        starts = self.rows.lengths
        self.rows.advance(mx.zeros((len(starts), rows), dtype=mx.int32), proposed)
        mask = self.cache.make_mask(rows, return_array=True)
        positions = mx.array(starts)[:, None] + mx.arange(rows)
        keys = positions[:, None, :, None].astype(mx.float32)
        read, _ = self.cache.update_and_fetch(keys, -keys)
        visible = mx.ones((rows, read.shape[2]), dtype=mx.bool_) if mask is None else mask
        shape = (len(starts), 1, rows, read.shape[2])
        for row, start in enumerate(starts):
            for number, shown in enumerate(mx.broadcast_to(visible, shape)[row, 0].tolist()):
                held = read[row, 0, :, 0].tolist()
                seen = [int(key) for key, sees in zip(held, shown, strict=True) if sees]
                end = start + number + 1
                assert seen == list(range(max(0, end - self.size), end))


@pytest.mark.parametrize("size", [3, 16, 300])
@pytest.mark.parametrize("count", [1, 3])
def test_any_rewinding_of_a_window_leaves_what_plain_decoding_has(size: int, count: int) -> None:
    """300 is more than DROP: entries are dropped while the window is not full."""
    choose = random.Random(size + count)
    window = Recorded(size, count)
    window.feed(size - 1)
    while min(window.rows.lengths) < size + 3 * DROP:
        rows = choose.choice([1, 2, 5, 9, 60])
        proposed = choose.randint(0, rows)
        window.feed(rows, proposed)
        window.rows.rewind(tuple(n - choose.randint(0, proposed) for n in window.rows.lengths))
        assert window.cache.keys is not None and window.cache.keys.shape[2] <= size + 4 * DROP
    if count > 1:
        other = Recorded(size)
        other.feed(2 * size + 1)
        window.rows.keep([2, 0])
        window.cache.keep([2, 0])
        window.rows.merge(other.rows)
        window.cache.merge(other.cache)
        for rows in (1, 4):
            window.feed(rows)


def test_a_final_pass_gives_up_the_way_back() -> None:
    states = States([ArraysCache(size=1)], None)
    for start, rows, proposed in ((0, 2, 2), (2, 1, 0)):
        with states.in_pass((start,), rows, proposed):
            states.caches[0][0] = mx.array([start + rows])
    with pytest.raises(RewindError, match="no copy was kept"):
        states.rewind((2,), (3,))


def test_nested_states_are_restored_in_place() -> None:
    pair = CacheList(ArraysCache(size=1), BatchedCache(Rows(1)))
    entries = [pair]
    states = States(entries, None)
    for start in (0, 1):
        with states.in_pass((start,), 1, 1):
            pair[0][0] = mx.array([start + 1])
    states.rewind((1,), (2,))
    assert entries == [pair] and pair[0][0].item() == 1


def test_sequences_go_back_to_different_passes() -> None:
    """As in a draft of a recurrent model: one token a pass, then one rewind."""
    entries = [ArraysCache(size=2)]
    states = States(entries, None)
    for start in range(4):
        with states.in_pass((start, start + 5, start + 9), 1, 1):
            entries[0][0] = mx.array([[start + 1], [start + 6], [start + 10]])
    states.rewind((2, 9, 11), (4, 9, 13))
    assert entries[0][0].tolist() == [[2], [9], [11]] and entries[0][1] is None
