"""Batches learn which size and which draft length bring the most tokens per second."""

from collections.abc import Callable

import pytest

from mlx_specdec.engine.memory import BatchSize


@pytest.mark.parametrize(
    ("rate", "most", "expected"),
    [
        (lambda size: size, 64, 64),
        (lambda size: size, 24, 16),
        (lambda size: min(size, 16), 64, 16),
        (lambda size: min(size, 4), 64, 4),
        (lambda size: 1.0, 64, 1),
        (lambda size: -abs(size - 32) + 100, 64, 32),
        (lambda size: 1 / size, 64, 1),
    ],
)
def test_the_size_of_batches_settles_where_most_tokens_come(
    rate: Callable[[int], float], most: int, expected: int
) -> None:
    size, seen = BatchSize(most=most), set()
    for _ in range(12):
        seen.add(size.size)
        size.took(int(1000 * rate(size.size)), 1000.0)
    assert size.size == expected
    assert max(seen) <= most
