"""What is read back: nothing may be missing, and nothing may be there that nobody asked for."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints.check import compare
from mlx_specdec.checkpoints.tensors import Tensor
from mlx_specdec.checkpoints.writer import Change, write_weights
from mlx_specdec.errors import OutputError

PAIRS = {name: Tensor.of(mx.arange(6, dtype=mx.float32).reshape(2, 3)) for name in "ab"}


def unchanged(name: str, tensor: Tensor) -> Change:
    return Change()


@pytest.mark.parametrize(
    ("written", "asked", "says"),
    [("ab", "a", "b should not be there"), ("a", "ab", "b is missing")],
)
def test_the_result_has_what_was_asked_for_and_no_more(
    tmp_path: Path, written: str, asked: str, says: str
) -> None:
    pairs = [(name, PAIRS[name]) for name in written]
    write_weights(tmp_path, pairs, unchanged, shard_bytes=1000)
    assert compare(tmp_path, pairs, unchanged).tensors == len(written)
    with pytest.raises(OutputError, match=says):
        compare(tmp_path, [(name, PAIRS[name]) for name in asked], unchanged)
