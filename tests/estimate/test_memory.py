from __future__ import annotations

from mlx_specdec.models.loading import outline

from ..support import tiny


def test_caches_grow_with_the_text() -> None:
    known = outline(tiny.CONFIGS["llama"], "llama")
    short, long = known.cache_nbytes(10, 10), known.cache_nbytes(10_000, 100)
    # Two layers of keys and values, two heads of eight numbers, in steps of 256 positions.
    per_position = 2 * 2 * 2 * 8 * 4
    assert short == 256 * per_position
    assert long in range(10_100 * per_position, (10_100 + 512) * per_position)
