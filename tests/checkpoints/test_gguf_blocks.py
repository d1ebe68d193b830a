"""GGUF's simple types keep their bits in MLX, and what is rounded a second time is said."""

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from mlx_lm.utils import load_model as load_by_mlx_lm

from mlx_specdec.checkpoints.formats.gguf import EXACT, GgufFile, part_of
from mlx_specdec.checkpoints.quantization import PARTS
from mlx_specdec.checkpoints.source import as_directory
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.report import ConversionReport
from mlx_specdec.conversion.verify import TextChange, compare_logits
from mlx_specdec.models import number_format
from mlx_specdec.models.loading import load_model

from ..support.gguf_files import Gguf, llama

FIXTURES = Path(__file__).parents[1] / "fixtures" / "gguf"
EMBEDDING, QUERY = "token_embd.weight", "blk.0.attn_q.weight"


def quantized(kind: Type, **kinds: Type) -> Gguf:
    """A small model whose matrices are of one type but for others, by the names of their layers.
    One matrix has rows that are no whole number of blocks and stays in float16."""
    model = llama()
    for name, array in list(model.arrays.items()):
        if array.ndim > 1 and array.shape[-1] % 32 == 0:
            model.quantize(name, kinds.get(name.removesuffix(".weight"), kind))
    return model


def entry(report: ConversionReport) -> Any:
    """The quantization entry of a result."""
    return json.loads((report.path / "config.json").read_text())["quantization"]


@pytest.mark.parametrize("kind", EXACT)
def test_every_block_has_the_same_values_in_mlx(kind: str) -> None:
    random = np.random.default_rng(3)
    nbytes = quants.quantize(np.zeros((1, 32), np.float32), Type[kind]).shape[-1]
    raw = random.integers(0, 256, (500, nbytes), np.uint8)
    raw[:, 1] &= 0xBF  # scales that are finite
    raw[:, 3] &= 0xBF
    parts = [part_of(part, kind, raw) for part in ("weight", *PARTS)]
    values = np.array(EXACT[kind].dequantize(*parts))
    assert np.array_equal(values, quants.dequantize(raw, Type[kind]))


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama-q4_0", 4), ("qwen2-q8_0", 8), ("mixtral", 8), ("t5-q4_1", 4)],
)
def test_a_conversion_keeps_every_bit(name: str, bits: int, quantize: bool, tmp_path: Path) -> None:
    report = convert(
        str(FIXTURES / f"{name}.gguf"),
        tmp_path / "out",
        quantize=quantize,
        q_bits=bits if quantize else None,
        compare_logits=compare_logits,
    )
    assert report.verified.logits == 0
    assert report.differences.plain == 0 and report.differences.quantized is None
    assert (entry(report)["bits"], entry(report)["group_size"]) == (bits, 32)
    assert report.notes[0].startswith("kept Q")


def test_each_matrix_has_its_own_bits_and_mlx_lm_computes_the_same(tmp_path: Path) -> None:
    model = quantized(Type.Q4_1, token_embd=Type.Q8_0)
    report = convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out", quantize=True)
    how = entry(report)
    assert (how["bits"], how["group_size"]) == (4, 32)
    assert how["model.embed_tokens"] == {"bits": 8, "group_size": 32}
    assert "kept Q4_1, Q8_0 bit for bit" in report.describe()
    reference, _ = load_by_mlx_lm(report.path)
    reference.set_dtype(mx.float32)
    tokens = mx.arange(12)[None]
    with as_directory(tmp_path / "m.gguf") as directory:
        logits = load_model(directory, dtype="float32").model.open([0]).advance(tokens).logits
    assert mx.allclose(reference(tokens), logits, atol=1e-4)


@pytest.mark.parametrize("expand", [False, True])
def test_a_file_that_is_loaded_has_the_values_of_its_blocks(expand: bool, tmp_path: Path) -> None:
    model = quantized(Type.Q4_0)
    with as_directory(model.write(tmp_path / "m.gguf")) as directory:
        loaded = load_model(directory, expand=expand)
    layer = loaded.model.network.model.embed_tokens
    assert hasattr(layer, "bits") != expand
    values = np.array(layer(mx.arange(40)))
    assert np.array_equal(values, quants.dequantize(model.arrays[EMBEDDING], Type.Q4_0))


def test_rows_of_rotary_heads_are_put_in_order(tmp_path: Path) -> None:
    model = quantized(Type.Q8_0)
    plain = llama()
    plain.arrays[QUERY] = quants.dequantize(model.arrays[QUERY], Type.Q8_0)
    packed = GgufFile(model.write(tmp_path / "m.gguf"))
    path = "model.layers.0.self_attn.q_proj"
    expected = GgufFile(plain.write(tmp_path / "plain.gguf")).rows(f"{path}.weight", 3, 20)
    parts = [packed.rows(f"{path}.{part}", 3, 20) for part in ("weight", *PARTS)]
    assert mx.array_equal(EXACT["Q8_0"].dequantize(*parts), expected)


@pytest.mark.parametrize("settings", [{}, {"q_bits": 5}, {"q_mode": "mxfp4"}])
def test_other_bits_than_those_of_the_file_are_rounded_again_and_said(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    file = quantized(Type.Q8_0).write(tmp_path / "m.gguf")
    small = {"q_group_size": 32} if "q_mode" not in settings else {}
    report = convert(str(file), tmp_path / "out", quantize=True, **{**small, **settings})
    how = entry(report)
    assert how["bits"] == settings.get("q_bits", 4)
    assert report.differences.quantized
    assert "Q8_0" in report.notes[0] and "rounding a second time" in report.notes[0]
    assert not any("kept" in note for note in report.notes)


def test_types_that_mlx_lacks_are_expanded_and_only_then_small_again(tmp_path: Path) -> None:
    file = str(FIXTURES / "llama-many.gguf")
    expanded = convert(file, tmp_path / "whole").notes[0]
    assert "Q4_K" in expanded and "to float32: --dtype float16 halves" in expanded
    assert "--dtype" not in convert(file, tmp_path / "half", dtype="float16").notes[0]
    again = convert(file, tmp_path / "again", quantize=True).describe()
    assert "rounding a second time costs accuracy; more --q-bits cost less" in again
    assert "small again" not in again


def test_a_matrix_in_half_precision_is_quantized_beside_those_that_are(tmp_path: Path) -> None:
    model = quantized(Type.Q4_0)
    model.arrays["output.weight"] = llama().arrays["output.weight"]
    del model.packed["output.weight"]
    settings = {"quantize": True, "q_group_size": 32}
    report = convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out", **settings)
    layer = load_by_mlx_lm(report.path)[0].lm_head
    assert (layer.bits, layer.group_size) == (4, 32)
    assert report.differences.quantized_name == "lm_head.weight"
    assert not any("quantized only" in note for note in report.notes)


def test_whole_weights_are_given_to_who_asks_for_them(tmp_path: Path) -> None:
    model = quantized(Type.Q4_0)
    file, out = str(model.write(tmp_path / "m.gguf")), tmp_path / "out"
    report = convert(file, out, dequantize=True, dtype="float32", compare_logits=compare_logits)
    assert "quantization" not in json.loads((out / "config.json").read_text())
    assert report.verified.logits is not None and report.verified.logits < 1e-3
    weights = mx.load(str(out / "model.safetensors"))
    values = quants.dequantize(model.arrays[EMBEDDING], Type.Q4_0)
    assert np.array_equal(np.array(weights["model.embed_tokens.weight"]), values)


@pytest.mark.parametrize(
    ("name", "is_noted"), [("llama-q5", True), ("llama-f16", False), ("llama-f32", False)]
)
def test_a_file_that_grows_in_memory_is_announced(
    name: str, is_noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(number_format, "NOTED_ABOVE", 1)
    with as_directory(FIXTURES / f"{name}.gguf") as directory:
        note = load_model(directory).note
    assert (f"{name}.gguf: its " in note and "in memory" in note) is is_noted


@pytest.mark.parametrize(
    ("same", "settings", "advice"),
    [
        (0.6, {}, "likeliest token changed at 40% .*: take --q-bits 5, or leave --quantize out"),
        (0.6, {"q_mode": "mxfp4"}, "take --q-bits 5 in place of the mode or predicate, or leave"),
        (0.6, {"q_bits": 8}, "40% of the positions: leave --quantize out"),
        (0.95, {}, ""),
    ],
)
def test_a_poor_result_is_called_one(
    same: float, settings: dict[str, Any], advice: str, tmp_path: Path
) -> None:
    text = TextChange(100, 20.0, 30.0, 0.5, 2.0, same)
    report = convert(
        str(FIXTURES / "llama-f32.gguf"),
        tmp_path / "out",
        quantize=True,
        compare_logits=lambda source, result: 1.0,
        compare_text=lambda source, result: text,
        **{**({} if "q_mode" in settings else {"q_group_size": 32}), **settings},
    )
    assert ("this conversion loses a lot" in report.describe()) == bool(advice)
    assert re.search(advice, report.verdict)
