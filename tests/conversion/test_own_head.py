"""A head beside a tied embedding is compared with it: it stays if the values differ."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec.conversion.convert import convert
from mlx_specdec.models.loading import load_model

from ..support import tiny
from ..support.checkpoints import save
from ..support.torch_files import save_torch

TOKENS = mx.array([[3, 14, 15, 9, 26, 5]])
TIED = {"tie_word_embeddings": True}
FAMILIES = ("llama", "qwen2", "gemma3_wrapped")


def write(name: str, directory: Path, config: dict[str, Any], *, sign: float = -1.0) -> Path:
    """Write a model that config.json says is tied, and a head of the table times `sign`."""
    tiny.write(name, directory)
    file = directory / "model.safetensors"
    weights = dict(mx.load(str(file)).items())
    table = next(name for name in weights if name.endswith("embed_tokens.weight"))
    head = table.replace("model.embed_tokens", "lm_head")
    weights[head] = sign * weights[table]
    mx.eval(weights)
    save(file, weights)
    stated = json.loads((directory / "config.json").read_text())
    for part in (stated, stated.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
        part |= config
    (directory / "config.json").write_text(json.dumps(stated))
    return directory


def ours(directory: Path) -> mx.array:
    return load_model(directory, dtype="float32").model.open([1]).advance(TOKENS).logits


@pytest.mark.parametrize("config", [TIED, {}])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_differs_is_used(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    tied = ours(write(name, tmp_path / "tied", config, sign=1.0))
    source = write(name, tmp_path / "apart", config)
    assert mx.allclose(ours(source), -tied, atol=1e-4)
    report = convert(str(source), tmp_path / "out")
    assert not report.tensor_report.tied
    assert not any("same values" in line for line in report.tensor_report.describe())
    network, _ = mlx_lm.utils.load_model(report.path)
    assert mx.allclose(network(TOKENS), -tied, atol=1e-4)


def test_an_equal_head_is_left_out(tmp_path: Path) -> None:
    source = write("llama", tmp_path / "source", TIED, sign=1.0)
    report = convert(str(source), tmp_path / "out")
    assert report.tensor_report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    written = json.loads((report.path / "config.json").read_text())
    assert written["tie_word_embeddings"] is True
    assert mx.array_equal(ours(report.path), ours(source))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_torch_files_are_compared_as_well(tmp_path: Path, sign: float) -> None:
    source = write("llama", tmp_path / "source", TIED, sign=sign)
    file = source / "model.safetensors"
    expected = ours(source)
    save_torch(source / "pytorch_model.bin", dict(mx.load(str(file)).items()))
    file.unlink()
    report = convert(str(source), tmp_path / "out")
    assert bool(report.tensor_report.tied) is (sign > 0)
    assert mx.allclose(ours(report.path), expected, atol=1e-4)


def test_of_quantized_matrices_scales_are_compared(tmp_path: Path) -> None:
    apart = write("llama", tmp_path / "source", {"tie_word_embeddings": False})
    quantized = convert(str(apart), tmp_path / "q", quantize=True, q_bits=8, q_group_size=32).path
    expected = ours(quantized)
    stated = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**stated, **TIED}))
    assert mx.array_equal(ours(quantized), expected)
