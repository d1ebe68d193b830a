"""How much memory loading takes, and which numbers it chooses on a CPU."""

import gc
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec.models.loading import load_model

from ..support import tiny
from ..support.checkpoints import T5, t5_weights, write_t5
from ..support.torch_files import save_torch

MARGIN = 4_000_000
"""Bytes of anything else: prompts, passes, tables."""
LLAMA = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "head_dim": 64,
}
WIDE_T5 = {"d_model": 256, "d_kv": 64, "d_ff": 512, "num_layers": 4, "num_decoder_layers": 4}


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No cycle is collected: what is freed is freed at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def write(kind: str, root: Path) -> tuple[Path, int]:
    """A model of some 20 MB in float32, and the bytes of its largest tensor."""
    if kind == "llama":
        directory = tiny.write("llama", root, **LLAMA)
        weights = dict(mx.load(str(directory / "model.safetensors")))
        return directory, max(array.nbytes for array in weights.values())
    config = {**T5, **WIDE_T5}
    weights = t5_weights(config)
    directory = write_t5(root / "t5", WIDE_T5, weights=weights)
    if kind == "torch-t5":
        (directory / "model.safetensors").unlink()
        save_torch(directory / "pytorch_model.bin", weights)
    return directory, max(array.nbytes for array in weights.values())


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", {"q_bits": 4}),
        ("llama", {}),
        ("t5", {"q_bits": 4}),
        ("t5", {"dtype": "bfloat16"}),
        ("torch-t5", {}),
    ],
    ids=["llama-4-bit", "llama", "t5-4-bit", "t5-half", "torch-t5"],
)
def test_loading_holds_the_result_and_one_tensor(
    kind: str, how: dict, tmp_path: Path, uncollected: None
) -> None:
    directory, largest = write(kind, tmp_path)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load_model(directory, **how).model
    held = mx.get_active_memory() - before
    assert held < model.nbytes + MARGIN / 4
    # The joined matrices of a T5's layer are three or four of its tensors.
    assert mx.get_peak_memory() - before < model.nbytes + 4 * largest + MARGIN
