"""Number formats of MLX and of other programs: what is read, written, and refused by name."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec import CheckpointError, convert, load

from ..support import tiny
from ..support.checkpoints import raw_file, save, write_t5
from .converted import SMALL, change_config, config_of, dequantized, provenance, refused, tensors
from .scores import letters, scores
from .support import command

# MLX's own formats. (mode, bits, group size)
MODES = [("mxfp4", 4, 32), ("nvfp4", 4, 16), ("mxfp8", 8, 32)]


@pytest.mark.parametrize(("mode", "bits", "size"), MODES)
def test_a_t5_in_every_number_format_loads_and_stays_near(
    tmp_path: Path, mode: str, bits: int, size: int
) -> None:
    source, out = write_t5(tmp_path / "t5", tokenizer=False), tmp_path / "out"
    flags = ("--model", source, "--mlx-path", out, "--quantize", "--q-mode", mode)
    assert command("convert", *flags).code == 0
    entry, before, after = config_of(out)["quantization"], tensors(source), tensors(out)
    assert (entry["bits"], entry["group_size"], entry["mode"]) == (bits, size, mode)
    if mode != "mxfp8":
        assert entry["shared"] == {"bits": 8, "group_size": 32, "mode": "mxfp8"}
    assert not any(name.endswith(".biases") for name in after)
    largest, whole = 0.0, dequantized(after, config_of(out))
    for name in [name.removesuffix(".scales") for name in after if name.endswith(".scales")]:
        how = entry.get(name, entry)
        sizes = {"group_size": how["group_size"], "bits": how["bits"], "mode": how["mode"]}
        packed = mx.quantize(before[f"{name}.weight"], **sizes)
        assert mx.array_equal(packed[0], after[f"{name}.weight"])
        off = mx.abs(whole[f"{name}.weight"] - before[f"{name}.weight"]).max()
        largest = max(largest, float(off))
    report = provenance(out)["result"]
    assert report["largest_difference_of_quantized"] == pytest.approx(largest) and largest < 1.5
    assert report["parameters"] == sum(array.size for array in before.values())
    assert report["largest_difference_of_log_probabilities"] is not None
    letters(out, 64)
    for dtype in ("auto", "float32"):
        log_p = scores(load(out, dtype=dtype), [0, 5, 9], [4, 6, 1], 64)
        assert np.isfinite(log_p).all()


# Checkpoints that other programs have quantized: those that are read, and names for the others.


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
WIDE = {"hidden_size": 192, "intermediate_size": 320}
QUERY = "model.layers.0.self_attn.q_proj"


def state(directory: Path, quantization: Mapping[str, Any]) -> Path:
    """Let config.json say how other programs quantized the weights."""
    return change_config(directory, quantization_config=dict(quantization))


def keep(directory: Path, weights: Mapping[str, mx.array]) -> None:
    save(directory / "model.safetensors", dict(weights))


def log_p(directory: Path) -> np.ndarray:
    return scores(load(letters(directory, 64), dtype="float32"), [1, 2, 3, 4, 5], None, 64)


def in_fp8(source: Path, directory: Path) -> Path:
    """Write the same model with matrices in blocks of 8-bit floats. `source` gets their values."""
    weights, header, data = tensors(source), {}, b""
    stored: dict[str, tuple[str, np.ndarray]] = {}
    for name, array in weights.items():
        if ".layers." not in name or array.ndim < 2:
            weights[name] = array.astype(mx.float32).astype(mx.bfloat16)
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
    keep(source, weights)
    directory.mkdir()
    shutil.copyfile(source / "config.json", directory / "config.json")
    raw_file(directory / "model.safetensors", header, data)
    return state(directory, FP8)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_blocks_of_8_bit_floats_are_read_and_converted(family: str, tmp_path: Path) -> None:
    plain = tiny.write(family, tmp_path / "plain", **WIDE)
    if family == "qwen3_moe":
        weights = tensors(plain)
        for name in [name for name in weights if ".switch_mlp." in name]:
            before, _, part = name.partition(".switch_mlp.")
            rows = weights.pop(name)
            weights |= {f"{before}.experts.{n}.{part}": row for n, row in enumerate(rows)}
        keep(plain, weights)
    source, out = in_fp8(plain, tmp_path / "fp8"), tmp_path / "out"
    expected = log_p(plain)
    assert np.array_equal(log_p(source), expected)
    convert(str(source), out)
    assert "quantization_config" not in config_of(out)
    assert np.array_equal(log_p(out), expected)
    if family == "qwen3":
        matrix = "model.layers.0.mlp.gate_proj.weight"
        assert mx.array_equal(tensors(out)[matrix], tensors(plain)[matrix])
    small = provenance(convert(str(source), tmp_path / "small", **SMALL).path)["result"]
    assert small["bytes"] < provenance(out)["result"]["bytes"] / 2


def test_weights_that_are_not_quantized_are_read_whatever_is_said(tmp_path: Path) -> None:
    source = tiny.write("llama", tmp_path / "m")
    expected = log_p(source)
    for method in ("awq", "gptq", "bitsandbytes", "compressed-tensors"):
        state(source, {"quant_method": method, "bits": 4, "format": "float-quantized"})
        assert np.array_equal(log_p(source), expected)
        out = convert(str(source), tmp_path / "out", overwrite=True).path
        assert "quantization_config" not in config_of(out)


BITSANDBYTES = {f"{QUERY}.weight": mx.zeros((512, 1), mx.uint8)}
BITSANDBYTES |= {f"{QUERY}.weight.absmax": mx.zeros((16,))}
PER_ROW = {f"{QUERY}.weight": mx.zeros((32, 32), mx.uint8)}
PER_ROW |= {f"{QUERY}.weight_scale": mx.zeros((32, 1))}
GPTQ = {f"{QUERY}.{part}": mx.zeros((4, 32), mx.int32) for part in ("qweight", "g_idx")}
GPTQ |= {f"{QUERY}.qzeros": mx.zeros((1, 4), mx.int32), f"{QUERY}.scales": mx.zeros((1, 32))}
T5_QUERY = "encoder.block.0.layer.0.SelfAttention.q.weight"


@pytest.mark.parametrize(
    ("family", "entry", "added", "parts"),
    [
        ("llama", {"quant_method": "bitsandbytes"}, BITSANDBYTES, ["by bitsandbytes in", "absmax"]),
        (
            "llama",
            {"quant_method": "compressed-tensors", "format": "float-quantized"},
            PER_ROW,
            ["by compressed-tensors (float-quantized) in a way that is not supported"],
        ),
        ("llama", {"quant_method": "fp8"}, PER_ROW, ["by fp8 in", "weight_scale is not part"]),
        ("llama", {"quant_method": "gptq", "bits": 4}, GPTQ, ["by gptq in a way that is not"]),
        (
            "t5",
            {"quant_method": "bitsandbytes"},
            {f"{T5_QUERY}.absmax": mx.zeros((4,), mx.uint8)},
            ["quantized by bitsandbytes in a way that is not"],
        ),
    ],
)
def test_quantizations_that_cannot_be_read_are_named(
    family: str, entry: dict[str, Any], added: dict[str, mx.array], parts: list[str], tmp_path: Path
) -> None:
    source = tmp_path / "m"
    _ = write_t5(source) if family == "t5" else tiny.write(family, source)
    keep(source, tensors(source) | added)
    state(source, entry)
    texts = [refused(CheckpointError, source)]
    with pytest.raises(CheckpointError) as caught:
        load(source)
    for text in (*texts, str(caught.value)):
        assert all(part in text for part in parts) and "download" not in text
