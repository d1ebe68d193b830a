"""Checkpoints that other programs have quantized: those that are read, and names for the others."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model

from ..support import tiny
from ..support.checkpoints import raw_file, write_t5

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
WIDE = {"hidden_size": 160, "intermediate_size": 288}
QUERY = "model.layers.0.self_attn.q_proj"


def state(directory: Path, quantization: Mapping[str, Any]) -> Path:
    """Let config.json say how other programs quantized the weights."""
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = dict(quantization)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def weights_of(directory: Path) -> dict[str, mx.array]:
    return dict(mx.load(str(directory / "model.safetensors")))  # type: ignore[arg-type]


def save(directory: Path, weights: Mapping[str, mx.array]) -> None:
    mx.save_safetensors(str(directory / "model.safetensors"), dict(weights), {"format": "pt"})


def logits(directory: Path) -> mx.array:
    model = load_model(directory, dtype="float32").model
    return model.open([1]).advance(mx.array([[1, 2, 3, 4, 5]])).logits


def in_fp8(source: Path, directory: Path) -> Path:
    """Write the same model with matrices in blocks of 8-bit floats. `source` gets their values."""
    weights, header, data = weights_of(source), {}, b""
    stored: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in weights.items():
        if ".layers." not in name or array.ndim < 2:
            values = array.astype(mx.float32)
            weights[name] = values.astype(mx.bfloat16)
            stored[name] = "BF16", np.array(weights[name].view(mx.uint16))
            continue
        rows, columns = array.shape
        random = np.random.default_rng(rows * columns)
        codes = random.integers(0, 256, array.shape, np.uint8)
        codes[codes & 0x7F == 0x7F] = 0  # the only two that are no numbers
        factors = random.uniform(0.0003, 0.001, (-(-rows // 128), -(-columns // 128)))
        factors = factors.astype(np.float32)
        spread = factors.repeat(128, axis=0)[:rows].repeat(128, axis=1)[:, :columns]
        values = mx.from_fp8(mx.array(codes), dtype=mx.float32) * mx.array(spread)
        weights[name] = values.astype(mx.bfloat16)
        stored[name], stored[f"{name}_scale_inv"] = ("F8_E4M3", codes), ("F32", factors)
    for name, (kind, values) in stored.items():
        offsets = [len(data), len(data) + values.nbytes]
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": offsets}
        data += values.tobytes()
    save(source, weights)
    directory.mkdir()
    shutil.copyfile(source / "config.json", directory / "config.json")
    raw_file(directory / "model.safetensors", header, data)
    return state(directory, FP8)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_blocks_of_8_bit_floats_are_read_and_converted(family: str, tmp_path: Path) -> None:
    plain = tiny.write(family, tmp_path / "plain", **WIDE)
    if family == "qwen3_moe":
        weights = weights_of(plain)
        for name in [name for name in weights if ".switch_mlp." in name]:
            before, _, part = name.partition(".switch_mlp.")
            rows = weights.pop(name)
            weights |= {f"{before}.experts.{n}.{part}": row for n, row in enumerate(rows)}
        save(plain, weights)
    source = in_fp8(plain, tmp_path / "fp8")
    assert mx.array_equal(logits(source), logits(plain))
    report = convert(str(source), tmp_path / "out", compare_logits=compare_logits)
    assert report.verified.logits == 0
    assert "quantization_config" not in json.loads((report.path / "config.json").read_text())
    assert mx.array_equal(logits(report.path), logits(plain))
    small = convert(str(source), tmp_path / "small", quantize=True, q_group_size=32)
    assert small.nbytes < report.nbytes / 2


def test_pieces_of_blocks_are_those_of_the_matrix(tmp_path: Path) -> None:
    source = in_fp8(tiny.write("qwen3", tmp_path / "plain", **WIDE), tmp_path / "fp8")
    weights, name = files.Weights(source), "model.layers.0.mlp.gate_proj.weight"
    expected = weights_of(tmp_path / "plain")[name]
    assert mx.array_equal(weights.read(name), expected)
    for begin, end in ((0, 288), (0, 5), (120, 130), (128, 256), (250, 288)):
        assert mx.array_equal(weights.rows(name, begin, end), expected[begin:end])
    assert f"{name}_scale_inv" not in weights.infos


def gptq(directory: Path, *, version: str, bits: int, order: int) -> tuple[Path, Path]:
    """Write the same model plain and as GPTQ stores it. order: 1 for groups in order, or -1."""
    plain = tiny.write("llama", directory / "plain", hidden_size=64, intermediate_size=128)
    weights, packed = weights_of(plain), {}
    random, most, per = np.random.default_rng(2), (1 << bits) - 1, 32 // bits
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    for name, array in weights.items():
        if not name.endswith("_proj.weight"):
            packed[name] = weights[name] = array.astype(mx.float16)
            continue
        outputs, inputs = array.shape
        path = name.removesuffix(".weight")
        numbers = random.integers(0, most + 1, (inputs, outputs)).astype(np.uint32)
        zeros = random.integers(1, most + 1, (inputs // 32, outputs)).astype(np.uint32)
        scales = (random.uniform(0.5, 1, zeros.shape) / most / 8).astype(np.float16)
        groups = np.arange(inputs) // 32
        values = scales[groups].astype(np.float32) * (numbers.astype(float) - zeros[groups])
        weights[name] = mx.array(values.T.astype(np.float32))
        stored = zeros - (version != "gptq_v2")
        shaped = numbers.reshape(inputs // per, per, outputs) << shifts[:, None]
        words = shaped.sum(axis=1, dtype=np.uint32)
        zero_words = (stored.reshape(-1, outputs // per, per) << shifts).sum(-1, dtype=np.uint32)
        packed[f"{path}.qweight"] = mx.array(words.view(np.int32))
        packed[f"{path}.qzeros"] = mx.array(zero_words.view(np.int32))
        packed[f"{path}.scales"] = mx.array(scales)
        packed[f"{path}.g_idx"] = mx.array(groups[::order].astype(np.int32))
    source = directory / "gptq"
    shutil.copytree(plain, source)
    save(plain, weights)
    save(source, packed)
    settings = {"bits": bits, "group_size": 32, "checkpoint_format": version}
    return plain, state(source, {"quant_method": "gptq", "desc_act": False, **settings})


@pytest.mark.parametrize(("version", "bits"), [("gptq", 4), ("gptq_v2", 4), ("gptq", 8)])
def test_gptq_with_groups_in_order_is_read(version: str, bits: int, tmp_path: Path) -> None:
    plain, source = gptq(tmp_path, version=version, bits=bits, order=1)
    # MLX keeps zero points times scales in half precision.
    assert mx.allclose(logits(source), logits(plain), atol=0.02)
    report = convert(str(source), tmp_path / "out", compare_logits=compare_logits)
    assert report.verified.logits == 0
    entry = json.loads((report.path / "config.json").read_text())["quantization"]
    assert (entry["bits"], entry["group_size"]) == (bits, 32)


def test_gptq_with_groups_in_another_order_is_refused(tmp_path: Path) -> None:
    _, source = gptq(tmp_path, version="gptq", bits=4, order=-1)
    with pytest.raises(CheckpointError, match=r"_proj in an order of its own \(desc_act\)"):
        load_model(source)
    state(source, {"quant_method": "gptq", "bits": 3, "group_size": 128})
    with pytest.raises(CheckpointError, match="GPTQ with 3 bits in groups of 128 is not"):
        load_model(source)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "compressed-tensors"])
def test_weights_that_are_not_quantized_are_read_whatever_is_said(
    method: str, tmp_path: Path
) -> None:
    source = tiny.write("llama", tmp_path / "m")
    expected = logits(source)
    state(source, {"quant_method": method, "bits": 4, "format": "float-quantized"})
    assert mx.array_equal(logits(source), expected)
    report = convert(str(source), tmp_path / "out")
    assert "quantization_config" not in json.loads((report.path / "config.json").read_text())


BITSANDBYTES = {f"{QUERY}.weight": mx.zeros((512, 1), mx.uint8)}
BITSANDBYTES |= {f"{QUERY}.weight.absmax": mx.zeros((16,))}
PER_ROW = {f"{QUERY}.weight": mx.zeros((32, 32), mx.uint8)}
PER_ROW |= {f"{QUERY}.weight_scale": mx.zeros((32, 1))}


@pytest.mark.parametrize(
    ("entry", "tensors", "message"),
    [
        ({"quant_method": "bitsandbytes"}, BITSANDBYTES, "by bitsandbytes in a way .*absmax"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            PER_ROW,
            r"by compressed-tensors \(float-quantized\) in a way that is not supported",
        ),
        ({"quant_method": "fp8"}, PER_ROW, "by fp8 in a way .*weight_scale is not part"),
    ],
)
def test_quantizations_that_cannot_be_read_are_named(
    entry: dict[str, Any], tensors: dict[str, mx.array], message: str, tmp_path: Path
) -> None:
    source = tiny.write("llama", tmp_path / "m")
    save(source, weights_of(source) | tensors)
    state(source, entry)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(source)
    assert "download" not in str(caught.value)
    with pytest.raises(CheckpointError, match=message):
        convert(str(source), tmp_path / "out")


def test_a_quantized_translator_is_named_too(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    save(source, weights_of(source) | {f"{name}.absmax": mx.zeros((4,), mx.uint8)})
    state(source, {"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="quantized by bitsandbytes in a way that is not"):
        load_model(source)
