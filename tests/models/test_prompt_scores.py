"""The memory and the length of a pass over a prompt, if its attention scores are held in memory."""

from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.core import loop
from mlx_specdec.core.loop import LARGE_CHUNK, PREFILL_CHUNK, chunk_size
from mlx_specdec.engine.memory import Extent, MemoryBudget
from mlx_specdec.models.mlx_lm import model as mlx_lm_model
from mlx_specdec.models.mlx_lm.model import DecoderOnlyModel

from ..support import tiny
from ..support.pairs import pair_of

PROMPT, STEP = 8000, 512


@pytest.fixture
def off_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm_model, "on_cpu", lambda: False)


@pytest.fixture
def accelerator(off_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `chunk_size` see a GPU with 64 GiB."""

    class Machine:
        cpu, Device = mx.cpu, mx.Device

        def default_device(self) -> object:
            return "gpu"

        def device_info(self) -> dict[str, int]:
            return {"memory_size": 64 << 30}

        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

    monkeypatch.setattr(loop, "mx", Machine())


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


def test_passes_are_short_if_they_hold_scores(accelerator: None) -> None:
    assert chunk_size(1, holds_scores=False) == LARGE_CHUNK
    assert chunk_size(1, holds_scores=True) == PREFILL_CHUNK
    assert chunk_size(1000, holds_scores=False) == PREFILL_CHUNK, "too little memory"


def test_admission_counts_the_scores_of_one_such_pass(accelerator: None) -> None:
    budget = MemoryBudget(pair_of(model(head_dim=256), None), ())
    extents = [Extent(PROMPT, PROMPT, PROMPT + 10)] * 2
    assert budget.of_prefill(extents) == 2 * 2 * 4 * PREFILL_CHUNK * PROMPT * mx.float32.size
