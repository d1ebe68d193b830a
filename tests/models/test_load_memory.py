"""How much memory loading takes, and which numbers it chooses on a CPU."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from mlx_specdec.models import number_format
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


def quantized(kind: str, root: Path, dtype: mx.Dtype) -> Path:
    """A 4-bit model whose scales are stored as `dtype`."""
    directory, _ = write(kind, root)
    network = load_model(directory, q_bits=4).model.network
    weights = {
        name: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for name, array in tree_flatten(network.parameters())
    }
    (directory / "model.safetensors").unlink()
    mx.save_safetensors(str(directory / "model.safetensors"), weights, {"format": "mlx"})
    config = json.loads((directory / "config.json").read_text())
    table = {"shared": {"bits": 8, "group_size": 64}} if kind == "t5" else {}
    config["quantization"] = {"bits": 4, "group_size": 64, **table}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.cpu_only
@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_weights_are_expanded_up_to_a_share_of_the_memory(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = quantized(kind, tmp_path, mx.float32)
    count = number_format.count(load_model(directory).model.network)
    monkeypatch.setattr(number_format, "NOTED_ABOVE", 1)
    needed = 4 * 4 * count
    for memory, expanded in ((needed + 4, True), (needed, False)):
        monkeypatch.setattr(number_format.system, "memory", lambda memory=memory: memory)
        loaded = load_model(directory)
        assert loaded.dtype == ("float32" if expanded else "4-bit, float32")
        assert number_format.count(loaded.model.network) == count
        assert ("--no-expand-weights" in loaded.note) is expanded
        assert ("drafts gain little; --expand-weights" in loaded.note) is not expanded
        assert load_model(directory, expand=not expanded).dtype != loaded.dtype
    assert "without --q-bits" in load_model(write(kind, tmp_path / "plain")[0], q_bits=4).note
