"""GGUF's quantized types keep their size in MLX, and what is rounded is said."""

import re
import shutil
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as Type
from mlx_lm.utils import load_model

from mlx_specdec import CheckpointError, convert, load

from ..support.gguf_files import SCALES, Gguf, llama, wide
from .converted import config_of, dequantized, provenance, tensors
from .scores import letters, scores
from .support import ROOT, command

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
EMBEDDING, QUERY = "token_embd.weight", "blk.0.attn_q.weight"
EXACT = {"Q4_0": 4, "Q4_1": 4, "Q5_0": 5, "Q5_1": 5, "Q8_0": 8}
"""The types whose blocks MLX has, bit for bit, and their bits."""
TOPS = {"Q2_K": 3, "Q3_K": 7, "Q4_K": 15, "Q5_K": 31, "Q6_K": 63}
"""K type -> the largest integer of a weight."""
INTEGERS = {
    "Q2_K": slice(16, 80),
    "Q3_K": slice(0, 96),
    "Q4_K": slice(16, 144),
    "Q5_K": slice(16, 176),
    "Q6_K": slice(0, 192),
}
"""K type -> the bytes of a block that hold the weights' integers."""
BITS = {**EXACT, "Q4_K": 4, "Q5_K": 5, "Q2_K": 5, "Q3_K": 6, "Q6_K": 8}
JOINED = ("Q2_K", "Q3_K", "Q6_K")
"""The types in which 16 weights share a scale."""
REFUSED = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"]
REFUSED += ["TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]
MIXTURES = {
    "Q4_K_M": ["Q4_K", "Q6_K", "Q4_K"],
    "Q5_K_M": ["Q5_K", "Q6_K"],
    "Q3_K_L": ["Q3_K", "Q5_K", "Q4_K", "Q6_K"],
    "Q4_K_M of odd widths": ["Q4_K", "Q5_0", "Q8_0", "Q6_K", "Q5_1"],
}
MODELS = {**{name: [name] for name in ("Q4_1", *TOPS)}, **MIXTURES}
"""Types of the matrices of a model. Of the types that MLX has, one is tried alone."""
MOST = {"Q4_K": 0.002, "Q5_K": 0.002, "Q3_K": 0.02, "Q2_K": 0.06}
"""The largest mean difference of log-probabilities, if it is not 0.01."""
ROUNDING, EIGHTH = 2.0**-11, 0.13
"""The largest relative error of float16, and the largest change of a weight by joining, in
scales."""
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


def written(kind: str, directory: Path) -> tuple[Gguf, dict[str, mx.array]]:
    """Return a model whose embedding has one type, and the embedding's tensors after a conversion:
    weight, scales and biases."""
    model = wide([Type[kind]])
    out = convert(str(model.write(directory / "m.gguf")), directory / "out").path
    entry, name = config_of(out)["quantization"], "model.embed_tokens"
    how = entry.get(name, entry)
    assert (how["bits"], how["group_size"]) == (BITS[kind], 32)
    found = tensors(out)
    return model, {part: found[f"{name}.{part}"] for part in ("weight", "scales", "biases")}


def values_of(arrays: dict[str, mx.array], bits: int) -> np.ndarray:
    """Dequantize with scales in float32."""
    scales, biases = (arrays[part].astype(mx.float32) for part in ("scales", "biases"))
    return np.array(mx.dequantize(arrays["weight"], scales, biases, group_size=32, bits=bits))


def groups_of(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the bias of each weight of a K type, float32, which the gguf package
    finds in blocks whose integers are 0 or the largest ones, and whose minimum is 0 for scales."""
    low, high = blocks.copy(), blocks.copy()
    low[:, INTEGERS[kind]], high[:, INTEGERS[kind]] = 0, 255
    if len(SCALES[kind]) > 1:
        high[:, SCALES[kind][1] :][:, :2] = 0
    lowest, highest = (quants.dequantize(part, Type[kind]) for part in (low, high))
    return (highest if len(SCALES[kind]) > 1 else highest - lowest) / TOPS[kind], lowest


@pytest.mark.parametrize("kind", EXACT)
def test_types_without_k_keep_every_value(kind: str, tmp_path: Path) -> None:
    model, arrays = written(kind, tmp_path)
    assert np.array_equal(values_of(arrays, BITS[kind]), model.values().arrays[EMBEDDING])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_k_types_with_groups_of_32_keep_their_integers_and_round_scales_to_float16(
    kind: str, tmp_path: Path
) -> None:
    model, arrays = written(kind, tmp_path)
    expected = model.values().arrays[EMBEDDING]
    blocks = model.arrays[EMBEDDING].reshape(-1, GGML_QUANT_SIZES[Type[kind]][1])
    scale, bias = (part.reshape(expected.shape)[:, ::32] for part in groups_of(blocks, kind))
    exact = {"scales": mx.array(scale), "biases": mx.array(bias)}
    assert np.array_equal(values_of({**arrays, **exact}, BITS[kind]), expected)
    for part, array in exact.items():
        assert arrays[part].dtype == mx.float16
        assert mx.array_equal(arrays[part], array.astype(mx.float16))
    most = ROUNDING * (np.abs(scale) * TOPS[kind] + np.abs(bias)).repeat(32, axis=1)
    assert (np.abs(values_of(arrays, BITS[kind]) - expected) <= 1.001 * most).all()


@pytest.mark.parametrize("kind", JOINED)
def test_joined_groups_change_no_weight_by_more_than_an_eighth_of_their_larger_scale(
    kind: str, tmp_path: Path
) -> None:
    model, arrays = written(kind, tmp_path)
    expected = model.values().arrays[EMBEDDING]
    blocks = model.arrays[EMBEDDING].reshape(-1, GGML_QUANT_SIZES[Type[kind]][1])
    scale, bias = (part.reshape(-1, 2, 16) for part in groups_of(blocks, kind))
    larger = np.abs(scale).max(axis=(1, 2))
    ends = np.abs(np.stack([bias, bias + TOPS[kind] * scale])).max(axis=(0, 2, 3))
    change = np.abs(values_of(arrays, BITS[kind]) - expected).reshape(-1, 32).max(axis=1)
    assert (change <= EIGHTH * larger + 2 * ROUNDING * ends).all()
    # The group with the larger scale is only rounded, in most pairs.
    off = np.abs(values_of(arrays, BITS[kind]) - expected).reshape(-1, 2, 16).max(axis=2)
    first = off[np.arange(len(off)), np.abs(scale[:, :, 0]).argmax(axis=1)]
    assert (first <= 2 * ROUNDING * ends).mean() > 0.75


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_choices_are_those_of_the_expanded_weights(name: str, tmp_path: Path) -> None:
    model = wide([Type[kind] for kind in MODELS[name]])
    places = {"packed": model, "whole": model.values()}
    pairs = {}
    for place, file in places.items():
        file.write(letters(tmp_path / place, 40) / "m.gguf")
        pairs[place] = load(tmp_path / place, expand_weights=False)
    pairs["expanded"] = load(tmp_path / "packed", expand_weights=True)
    convert(str(tmp_path / "packed"), tmp_path / "out")
    pairs["converted"] = load(letters(tmp_path / "out", 40), expand_weights=False)
    found = {place: scores(pair, TOKENS, None, 40) for place, pair in pairs.items()}
    assert np.array_equal(found["converted"], found["packed"])
    assert np.allclose(found["expanded"], found["packed"], atol=1e-4)
    most = 1e-6 if name in EXACT else MOST.get(name, 0.01)
    assert np.abs(found["packed"] - found["whole"]).mean() < most
    assert (found["packed"].argmax(axis=1) == found["whole"].argmax(axis=1)).mean() > 0.9


def test_tensors_whose_groups_were_joined_are_named_with_their_largest_change(
    tmp_path: Path,
) -> None:
    model = wide([Type.Q4_K])
    for name in ("token_embd.weight", "blk.0.ffn_down.weight"):
        model.arrays[name] = np.ones(
            (40 if "embd" in name else 256, 256 if "embd" in name else 512)
        )
        model.fill(name, Type.Q6_K)
    model.write(letters(tmp_path, 40) / "m.gguf")
    [note] = load(tmp_path).notes
    assert re.search(r"model\.embed_tokens 0\.12\d", note)
    assert re.search(r"model\.layers\.0\.mlp\.down_proj 0\.12\d", note)
    assert "up_proj" not in note
    _, err = converted(model, tmp_path)
    assert "model.embed_tokens 0.12" in " ".join(err.split())
    assert "kept Q4_K at 4 bits, Q6_K at 8 bits" in " ".join(err.split())
    assert "by at most 0.05 %" in " ".join(err.split())


@pytest.mark.parametrize("kind", REFUSED)
def test_types_that_mlx_lacks_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    model = wide([Type.Q4_K])
    size, nbytes = GGML_QUANT_SIZES[Type[kind]]
    model.arrays[EMBEDDING] = np.zeros((40, 256 // size * nbytes), np.uint8)
    model.packed[EMBEDDING] = (256, 40), Type[kind].value
    file = model.write(tmp_path / "m.gguf")
    with pytest.raises(CheckpointError, match=f"holds {kind}, which is not read"):
        load(file)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("llama-q4_0", 4), ("qwen2-q8_0", 8), ("mixtral", 8), ("t5-q4_1", 4)],
)
def test_a_conversion_keeps_every_bit(name: str, bits: int, tmp_path: Path) -> None:
    out = convert(str(FIXTURES / f"{name}.gguf"), tmp_path / "out").path
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
    out, err = converted(model, letters(tmp_path, 40))
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


def test_quantized_matrices_are_not_quantized_again(tmp_path: Path) -> None:
    file = quantized(Type.Q8_0).write(tmp_path / "m.gguf")
    refused = command("convert", "--model", file, "--mlx-path", tmp_path / "out", "-q")
    refused.refuses("is quantized already: leave --quantize out, or write it with --dequantize")
    whole, _ = converted(quantized(Type.Q8_0), tmp_path, "--dequantize")
    out = convert(str(whole), tmp_path / "again", quantize=4, q_group_size=32).path
    assert config_of(out)["quantization"]["bits"] == 4


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
