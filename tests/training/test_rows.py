"""Rows on disk: what comes back, and what an interruption costs."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.training.collect import SampleFiles

WIDTH = 3


def states(count: int, first: int = 0) -> mx.array:
    numbers = mx.arange(first, first + count * WIDTH)
    return numbers.reshape(count, WIDTH).astype(mx.float32)


def filled(directory: Path) -> SampleFiles:
    rows = SampleFiles(directory, WIDTH, mx.float32)
    rows.append([10, 11, 12], states(3))
    rows.append([], None)
    rows.append([20, 21], states(2, 100))
    return rows


@pytest.mark.parametrize("file", ["states.bin", "tokens.bin", "lengths.bin"])
def test_a_sample_half_written_is_cut_off(file: str, tmp_path: Path) -> None:
    filled(tmp_path)
    with (tmp_path / file).open("ab") as stream:
        stream.write(b"abc")
    again = SampleFiles(tmp_path, WIDTH, mx.float32)
    again.append([30], states(1, 200))
    assert again.lengths.tolist() == [3, 0, 2, 1]
    assert again.states(np.array([5])).tolist() == [[200, 201, 202]]
