"""GGUF's simple types keep their bits in MLX, and what is rounded a second time is said."""

import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from mlx_lm.utils import load_model

from mlx_specdec import convert, load

from ..support.gguf_files import Gguf, llama
from .converted import config_of, dequantized, provenance, tensors
from .scores import letters, scores
from .support import ROOT, command

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
EMBEDDING, QUERY = "token_embd.weight", "blk.0.attn_q.weight"
EXACT = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
"""The types whose blocks MLX has, bit for bit, and their bits."""
KINDS = [*EXACT, "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ1_M"]
KINDS += ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
KINDS += ["TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
TOKENS = list(range(12))


def quantized(kind: Type, **kinds: Type) -> Gguf:
    """A small model whose matrices are of one type but for others, by the names of their layers.
    One matrix has rows that are no whole number of blocks and stays in float16."""
    model = llama()
    for name, array in list(model.arrays.items()):
        if array.ndim > 1 and array.shape[-1] % 32 == 0:
            model.quantize(name, kinds.get(name.removesuffix(".weight"), kind))
    return model


def converted(model: Gguf, directory: Path, *flags: object) -> tuple[Path, str]:
    """Convert a model with these flags. Return its directory, and what the user reads."""
    directory.mkdir(exist_ok=True)
    file, out = model.write(directory / "m.gguf"), directory / "out"
    done = command("convert", "--model", file, "--mlx-path", out, "--overwrite", *flags)
    assert done.code == 0, done.err
    return out, done.err


@pytest.mark.parametrize("kind", [Type[name] for name in KINDS], ids=KINDS)
def test_every_block_has_the_values_that_the_library_gguf_gives_it(
    kind: Type, tmp_path: Path
) -> None:
    """All bytes of the blocks are random, but only blocks of finite, not huge values are taken."""
    width, random, model = 256, np.random.default_rng(3), llama()
    model.metadata["llama.embedding_length"] = width
    for name, array in model.arrays.items():
        sizes = {32: width, 16: width // 2}
        shape = [sizes.get(extent, extent) for extent in array.shape]
        model.arrays[name] = np.ones(shape, array.dtype)
    size, nbytes = GGML_QUANT_SIZES[kind]
    raw = random.integers(0, 256, (200 * width // size, nbytes), np.uint8)
    with np.errstate(all="ignore"):
        values = quants.dequantize(raw, kind).astype(np.float32)
    usual = np.flatnonzero(np.abs(values).max(axis=-1) < 1e4)[: 40 * width // size]
    raw, values = raw[usual].reshape(40, -1), values[usual].reshape(40, width)
    model.arrays[EMBEDDING], model.packed[EMBEDDING] = raw, ((width, 40), kind.value)
    out = convert(str(model.write(tmp_path / "m.gguf")), tmp_path / "out").path
    written, name = tensors(out), "model.embed_tokens"
    if kind.name in EXACT:
        entry = config_of(out)["quantization"]
        how = entry.get(name, entry)
        assert (how["bits"], how["group_size"]) == (EXACT[kind.name], 32)
        written = dequantized(written, config_of(out))
    found = written[f"{name}.weight"].astype(mx.float32)
    assert np.array_equal(np.array(found), values)


@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama-q4_0", 4), ("qwen2-q8_0", 8), ("mixtral", 8), ("t5-q4_1", 4)],
)
def test_a_conversion_keeps_every_bit(name: str, bits: int, quantize: bool, tmp_path: Path) -> None:
    how: dict[str, Any] = {"quantize": bits} if quantize else {}
    out = convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out", **how).path
    entry, report = config_of(out)["quantization"], provenance(out)["result"]
    assert report["largest_difference"] == 0
    assert report["largest_difference_of_quantized"] is None
    assert (entry["bits"], entry["group_size"]) == (bits, 32)
    with np.load(FIXTURES / f"{name}.npz") as expected:
        tokens, log_p = expected["tokens"].tolist(), expected["log_p"]
        source = expected["source"].tolist() if "source" in expected else None
    pair = load(letters(out, log_p.shape[1]), dtype="float32")
    assert np.abs(scores(pair, tokens, source, log_p.shape[1]) - log_p).max() < 1e-4


def test_each_matrix_has_its_own_bits_and_mlx_lm_computes_the_same(tmp_path: Path) -> None:
    model = quantized(Type.Q4_1, token_embd=Type.Q8_0)
    out, err = converted(model, letters(tmp_path, 40), "--quantize")
    how = config_of(out)["quantization"]
    assert (how["bits"], how["group_size"]) == (4, 32)
    assert how["model.embed_tokens"] == {"bits": 8, "group_size": 32}
    assert "kept Q4_1, Q8_0 bit for bit" in err
    reference, _ = load_model(out)
    reference.set_dtype(mx.float32)
    logits = reference(mx.array([TOKENS]))[0]
    expected = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
    shutil.rmtree(out)
    for expand in (False, True):
        pair = load(tmp_path, dtype="float32", expand_weights=expand)
        assert np.allclose(scores(pair, TOKENS, None, 40), expected, atol=1e-4)


@pytest.mark.parametrize("flags", [(), ("--q-bits", 5), ("--q-mode", "mxfp4")])
def test_other_bits_than_those_of_the_file_are_rounded_again_and_said(
    flags: tuple[object, ...], tmp_path: Path
) -> None:
    size = () if "--q-mode" in flags else ("--q-group-size", 32)
    out, err = converted(quantized(Type.Q8_0), tmp_path, "--quantize", *size, *flags)
    assert config_of(out)["quantization"]["bits"] == (5 if 5 in flags else 4)
    assert provenance(out)["result"]["largest_difference_of_quantized"] > 0
    assert "Q8_0" in err and "rounding a second time" in err and "kept Q" not in err


def test_types_that_mlx_lacks_are_expanded_and_only_then_small_again(tmp_path: Path) -> None:
    texts = {}
    for name, flags in {"whole": (), "half": ("--dtype", "float16"), "again": ("-q",)}.items():
        place = ("--mlx-path", tmp_path / name)
        done = command("convert", "--model", FIXTURES / "llama-many.gguf", *place, *flags)
        texts[name] = " ".join(done.err.split())
        assert done.code == 0
    assert "Q4_K" in texts["whole"] and "to float32: --dtype float16 halves" in texts["whole"]
    assert "--dtype" not in texts["half"]
    assert "a second time costs accuracy; more --q-bits cost less" in texts["again"]
    assert "small again" not in texts["again"]


def test_a_matrix_in_half_precision_is_quantized_beside_those_that_are(tmp_path: Path) -> None:
    model = quantized(Type.Q4_0)
    model.arrays["output.weight"] = llama().arrays["output.weight"]
    del model.packed["output.weight"]
    out, err = converted(model, tmp_path, "--quantize", "--q-group-size", 32)
    layer = load_model(out)[0].lm_head
    assert (layer.bits, layer.group_size) == (4, 32)
    assert "(lm_head.weight)" in err and "quantized only" not in err


def test_whole_weights_are_given_to_who_asks_for_them(tmp_path: Path) -> None:
    model = quantized(Type.Q4_0)
    out, _ = converted(model, tmp_path, "--dequantize", "--dtype", "float32")
    assert "quantization" not in config_of(out)
    values = quants.dequantize(model.arrays[EMBEDDING], Type.Q4_0)
    assert np.array_equal(np.array(tensors(out)["model.embed_tokens.weight"]), values)


def test_rows_of_rotary_heads_are_put_in_order(tmp_path: Path) -> None:
    model, plain = quantized(Type.Q8_0), llama()
    plain.arrays[QUERY] = quants.dequantize(model.arrays[QUERY], Type.Q8_0)
    one, two = (converted(file, tmp_path / str(n))[0] for n, file in enumerate((model, plain)))
    name = "model.layers.0.self_attn.q_proj.weight"
    packed = dequantized(tensors(one), config_of(one))
    assert mx.array_equal(packed[name], tensors(two)[name])
