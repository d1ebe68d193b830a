"""Checkpoints that have only torch's files: the same result as from their safetensors twins."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.models.loading import load_model

from ..support import tiny
from ..support.checkpoints import listing
from ..support.torch_files import save_torch

FIXTURES = Path(__file__).parents[1] / "fixtures"
TWINS = {
    "old-t5": FIXTURES / "t5" / "tied-scaled-relu",
    "sharded-t5": FIXTURES / "t5" / "own-head-gated-gelu",
    "llama": FIXTURES / "torch" / "llama",
}


def pair(name: str, root: Path) -> tuple[Path, Path]:
    """The same model as safetensors alone and as torch's files alone."""
    plain, torch = root / "plain", root / "torch"
    shutil.copytree(TWINS[name], plain, ignore=shutil.ignore_patterns("*.bin", "*.npz"))
    weights = shutil.ignore_patterns("*.safetensors", "*.npz")
    shutil.copytree(FIXTURES / "torch" / name, torch, ignore=weights)
    shutil.copy(plain / "config.json", torch)
    return plain, torch


def check_twins(plain: Path, torch: Path, root: Path, **how: Any) -> None:
    """Convert both and compare all that is written and reported."""
    first = convert(str(plain), root / "first", **how)
    second = convert(str(torch), root / "second", **how)
    wanted, found = listing(root / "first"), listing(root / "second")
    assert wanted.keys() == found.keys()
    same = [key for key in wanted if "safetensors" not in key and key != "provenance.json"]
    assert all(wanted[key] == found[key] for key in same)
    before, after = (dict(files.tensors(report.path)) for report in (first, second))
    assert before.keys() == after.keys()
    for key, array in before.items():
        assert array.dtype == after[key].dtype and mx.array_equal(array, after[key]).item()
    assert second.differences.tensors == first.differences.tensors
    assert second.parameters == first.parameters and second.nbytes == first.nbytes


@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}, {"shard_bytes": 20_000}])
def test_a_torch_checkpoint_converts_to_the_files_of_its_twin(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    check_twins(*pair(name, tmp_path), tmp_path, **how)


def test_a_converted_llama_computes_what_transformers_does(tmp_path: Path) -> None:
    _, torch = pair("llama", tmp_path)
    expected = np.load(FIXTURES / "torch" / "llama" / "expected.npz")
    convert(str(torch), tmp_path / "out")
    for directory in (torch, tmp_path / "out"):
        context = load_model(directory, dtype="float32").model.open([0])
        rows = context.advance(mx.array(expected["tokens"])[None]).logits[0]
        log_p = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
        assert mx.max(mx.abs(log_p - mx.array(expected["log_p"]))).item() < 1e-4


def test_experts_that_mlx_lm_joins_come_out_as_from_safetensors(tmp_path: Path) -> None:
    plain = tiny.write("mixtral", tmp_path / "plain")
    weights = dict(files.tensors(plain))
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for key in [key for key in weights if "switch_mlp" in key]:
        prefix, _, part = key.removesuffix(".weight").rpartition(".switch_mlp.")
        for number, expert in enumerate(weights.pop(key)):
            weights[f"{prefix}.experts.{number}.{names[part]}.weight"] = mx.contiguous(expert)
    source = tmp_path / "torch"
    source.mkdir()
    save_torch(source / "pytorch_model.bin", weights)
    shutil.copy(plain / "config.json", source)
    first = convert(str(plain), tmp_path / "first").path
    report = convert(str(source), tmp_path / "second", compare_logits=compare_logits)
    before, after = dict(files.tensors(first)), dict(files.tensors(report.path))
    assert before.keys() == after.keys()
    assert all(mx.array_equal(before[key], after[key]).item() for key in before)
    assert report.verified.logits == 0.0 and "joined into" in report.describe()
    assert listing(first).keys() == listing(report.path).keys()
