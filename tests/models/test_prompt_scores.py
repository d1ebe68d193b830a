"""The memory and the length of a pass over a prompt, if its attention scores are held in memory."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.models.mlx_lm import model as mlx_lm_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny

PROMPT, STEP = 8000, 512


@pytest.fixture
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_model, "on_cpu", lambda: False)


def model(family: str = "llama", **changes: Any) -> DecoderOnlyModel:
    return DecoderOnlyModel(tiny.build(family, **changes))


SCORES = STEP * PROMPT * mx.float32.size
"""Bytes of one head's scores."""


@pytest.mark.parametrize(
    ("family", "changes", "heads"),
    [
        *(("llama", {"head_dim": size}, 0) for size in (64, 72, 80, 96, 128)),
        *(
            (family, {"head_dim": size}, tiny.CONFIGS[family]["num_attention_heads"])
            for family in ("llama", "gemma3", "qwen3_next")
            for size in (112, 192, 256, 512)
        ),
        ("mamba2", {}, 0),
    ],
)
def test_scores_are_held_with_their_softmax_unless_a_kernel_fuses_them(
    family: str, changes: dict[str, int], heads: int, off_cpu: None
) -> None:
    target = model(family, **changes)
    assert target.holds_scores is (heads > 0)
    assert target.prefill_nbytes(PROMPT, STEP) == 2 * heads * SCORES
