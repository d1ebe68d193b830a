"""How much memory loading takes, and which numbers it chooses on a CPU."""

import gc
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.models.encoder_decoder.context import share_equal_encoder
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.number_format import evaluate, expand

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


@pytest.mark.parametrize("bits", [4, 5, 6])
def test_dequantizing_holds_little_more_than_the_result(bits: int, uncollected: None) -> None:
    network = nn.Sequential(nn.Embedding(1 << 14, 512))
    nn.quantize(network, 32, bits)
    mx.eval(network.parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    expand(network)
    evaluate(network)
    assert mx.get_peak_memory() - before < 3 * network.layers[0].weight.nbytes


def test_a_draft_frees_the_encoder_that_it_shares(tmp_path: Path, uncollected: None) -> None:
    directory, _ = write("t5", tmp_path)
    draft, target = (load_model(directory).model for _ in range(2))
    before = mx.get_active_memory()
    assert share_equal_encoder(draft, target)
    own = sum(a.nbytes for n, a in tree_flatten(draft.network.parameters()) if "decoder" in n)
    assert before - mx.get_active_memory() > 0.9 * (draft.nbytes - own)
