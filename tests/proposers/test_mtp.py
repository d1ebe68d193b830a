"""A layer for multi-token prediction with a latent absorbs the rows of a small pass."""

from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.engine import loading
from mlx_specdec.models.mlx_lm import attention
from mlx_specdec.models.mlx_lm.attention import absorbed_calls

from ..support import mtp
from ..support.tokenizers import byte_level

SIZE = 400


def target(family: str, directory: Path) -> Path:
    """A target with a tokenizer."""
    return byte_level(mtp.write(family, directory, vocabulary=SIZE))


def apart(one: mx.array, two: mx.array) -> float:
    return mx.max(mx.abs(one - two)).item()  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_rows_of_a_layer_with_a_latent_are_absorbed(family: str, tmp_path: Path) -> None:
    pair = loading.load(target(family, tmp_path / family))
    assert pair.drafter_network is not None
    hidden = mx.random.normal((1, 9, pair.target.width), key=mx.random.key(1))
    tokens = mx.random.randint(0, SIZE, (1, 9), key=mx.random.key(2))

    def last(rows: int) -> mx.array:
        context = pair.drafter_network.open()
        for start in (0, *range(5, 9, rows)):
            end = start + rows if start else 5
            context.add(hidden[:, start:end], [end - start])
            logits = context.first_logits(tokens[:, start:end].tolist(), 1)
        return logits

    before, single = absorbed_calls(), last(1)
    first = absorbed_calls() - before
    assert apart(last(4), single) < 1e-5
    assert absorbed_calls() - before == 2 * first + 1, "the first five rows, and the four"
    attention.release(attention.expanding(pair.drafter_network))
    before, expanded = absorbed_calls(), last(4)
    assert absorbed_calls() == before and apart(expanded, single) < 1e-4
