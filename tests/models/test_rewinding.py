"""Windows and recurrent states that are rewound at random hold what plain decoding has."""

import random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from mlx_specdec.models.mlx_lm.caches import WindowCache
from mlx_specdec.models.mlx_lm.context import DecoderOnlyContext
from mlx_specdec.models.rows import DROP, Rows


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


def test_sequences_go_back_to_different_passes() -> None:
    """As in a draft of a recurrent model: one token a pass, then one rewind."""

    def run(tokens: mx.array, entries: Any, hidden: object) -> None:
        entries[0][0] = tokens

    network: Any = SimpleNamespace(run=run)
    context = DecoderOnlyContext(network, [lambda _: ArraysCache(size=2)], 3)
    context.rows.begin((0, 5, 9))
    for start in range(4):
        context.advance(mx.array([[start + 1], [start + 6], [start + 10]]), proposed=1)
    context.rewind((2, 9, 11))
    assert context.states[0].cache[0].tolist() == [[2], [9], [11]]
