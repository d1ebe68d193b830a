"""Conversion of decoder-only models: the result is what mlx-lm itself would write."""

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import mixed_quant_predicate_builder

from mlx_specdec import convert, load

from ..support import tiny
from ..support.checkpoints import listing, save
from ..support.torch_files import save_torch
from .converted import (
    SMALL,
    config_of,
    dequantized,
    provenance,
    same,
    tensors,
)
from .scores import distance, letters, scores
from .support import ROOT, command

FIXTURES = ROOT / "tests" / "fixtures"
INDEX = "model.safetensors.index.json"
TOKENS = [3, 14, 15, 9, 26, 5]
FORMATS = ("mxfp4", "nvfp4", "mxfp8")
RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")


def theirs(directory: Path) -> mx.array:
    """Return what mlx-lm computes."""
    return mlx_lm.utils.load_model(directory)[0](mx.array([TOKENS]))


def ours(directory: Path) -> np.ndarray:
    """Return log p. The model has 64 tokens; a tokenizer is added."""
    return scores(load(letters(directory, 64), dtype="float32"), TOKENS, None, 64)


def mlx_lm_conversion(source: Path, target: Path, recipe: str = "", **how: Any) -> Path:
    """Convert a model with mlx-lm's own functions."""
    model, config = mlx_lm.utils.load_model(source, lazy=True)
    if how:
        if recipe:
            how["quant_predicate"] = mixed_quant_predicate_builder(recipe, model, how["group_size"])
        model, config = mlx_lm.utils.quantize_model(model, config, **how)
        if recipe:
            config["quantization"]["group_size"] = how["group_size"]  # as mlx_lm.convert has it
    mlx_lm.utils.save_model(target, model)
    mlx_lm.utils.save_config(config, target / "config.json")
    return target


@pytest.mark.parametrize("name", ["llama", "gemma3_wrapped", "mixtral", "phi3", "mamba2"])
@pytest.mark.parametrize("how", [{}, {"group_size": 32, "bits": 4}])
def test_the_result_is_what_mlx_lm_writes(
    tmp_path: Path, name: str, how: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write(name, tmp_path / "source")
    reference = mlx_lm_conversion(source, tmp_path / "theirs", **how)
    capsys.readouterr()
    result = convert(str(source), tmp_path / "ours", **(SMALL if how else {})).path
    assert same(tensors(reference), tensors(result))
    assert config_of(result) == config_of(reference)
    index, expected = (
        json.loads((directory / INDEX).read_text()) for directory in (result, reference)
    )
    assert index["weight_map"] == expected["weight_map"]
    assert index["metadata"]["total_size"] == expected["metadata"]["total_size"]
    if name != "mamba2":  # mlx-lm does not count what lies outside a leaf module, as A_log does
        assert index["metadata"] == expected["metadata"]
    assert mx.array_equal(theirs(result), theirs(reference))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("recipe", [*FORMATS, *RECIPES])
def test_a_llama_is_quantized_as_mlx_lm_does(tmp_path: Path, recipe: str) -> None:
    source = tiny.write("llama", tmp_path / "llama")
    if recipe in FORMATS:
        mine: dict[str, Any] = {"quantize": recipe}
        how: dict[str, Any] = {"bits": None, "group_size": None, "mode": recipe}
    else:
        mine, how = {**SMALL, "quantize": recipe}, {"bits": 4, "group_size": 32}
    reference = mlx_lm_conversion(
        source, tmp_path / "theirs", "" if recipe in FORMATS else recipe, **how
    )
    result = convert(str(source), tmp_path / "out", **mine).path
    assert recipe in provenance(result)["result"]["dtype"]
    parameters = [
        dict(tree_flatten(mlx_lm.utils.load_model(directory)[0].parameters()))
        for directory in (result, reference)
    ]
    assert same(*parameters)


def test_layers_that_mlx_lm_keeps_wider_are_recorded(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_dim": 16, "moe_intermediate_size": 64}
    source = tiny.write("qwen3_moe", tmp_path / "source", **sizes)
    arguments = ("--model", source, "--mlx-path", tmp_path / "out", "-q", "--q-group-size", 64)
    done = command("convert", *arguments)
    entry = config_of(tmp_path / "out")["quantization"]
    assert entry["model.layers.0.mlp.gate"] == {"bits": 8, "group_size": 64}
    assert done.code == 0 and "mlp.gate" in done.err
    assert mx.all(mx.isfinite(theirs(tmp_path / "out"))).item()


# Heads that differ from a tied embedding


TIED = {"tie_word_embeddings": True}


def write(name: str, directory: Path, config: dict[str, Any], *, sign: float) -> Path:
    """Write a model that config.json says is tied, and a head of the table times `sign`."""
    tiny.write(name, directory)
    weights = tensors(directory)
    table = next(name for name in weights if name.endswith("embed_tokens.weight"))
    weights[table.replace("model.embed_tokens", "lm_head")] = sign * weights[table]
    mx.eval(weights)
    save(directory / "model.safetensors", weights)
    stated = config_of(directory)
    for part in (stated, stated.get("text_config", {})):
        part.pop("tie_word_embeddings", None)
        part |= config
    (directory / "config.json").write_text(json.dumps(stated))
    return directory


def negative(log_p: np.ndarray) -> np.ndarray:
    """Return log p of the negative logits."""
    return -log_p - np.log(np.exp(-log_p).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("config", [TIED, {}])
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_wrapped"])
def test_a_head_that_differs_is_used(tmp_path: Path, name: str, config: dict[str, Any]) -> None:
    tied = ours(write(name, tmp_path / "tied", config, sign=1.0))
    source = write(name, tmp_path / "apart", config, sign=-1.0)
    assert np.allclose(ours(source), negative(tied), atol=1e-3)
    report = convert(str(source), tmp_path / "out")
    assert not provenance(report.path)["tensors"]["tied"]
    assert np.allclose(ours(report.path), negative(tied), atol=1e-3)


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_an_equal_head_is_left_out(tmp_path: Path, sign: float, as_torch: bool) -> None:
    source = write("llama", tmp_path / "source", TIED, sign=sign)
    expected, file = ours(source), source / "model.safetensors"
    if as_torch:
        save_torch(source / "pytorch_model.bin", tensors(source))
        file.unlink()
    convert(str(source), tmp_path / "out")
    tied = {"lm_head.weight": "model.embed_tokens.weight"} if sign > 0 else {}
    assert provenance(tmp_path / "out")["tensors"]["tied"] == tied
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is (sign > 0)
    assert np.allclose(ours(tmp_path / "out"), expected, atol=1e-4)


# Other number formats, and back


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_dequantizing_gives_the_values_that_were_quantized(tmp_path: Path, mode: str) -> None:
    source = tiny.write("llama", tmp_path / "llama")
    size: dict[str, Any] = {"q_group_size": 32} if mode == "affine" else {}
    small = convert(str(source), tmp_path / "q", quantize=mode, **size).path
    out = convert(str(small), tmp_path / "out", dtype="float32", quantize="none").path
    config = config_of(out)
    assert "quantization" not in config and "quantization_config" not in config
    assert same(tensors(out), dequantized(tensors(small), config_of(small)))
    report = provenance(out)
    assert report["result"]["largest_difference"] == 0 and report["tensors"]["computed"]


# Torch archives


TWINS = {
    "old-t5": FIXTURES / "t5" / "tied-scaled-relu",
    "sharded-t5": FIXTURES / "t5" / "own-head-gated-gelu",
    "llama": FIXTURES / "torch" / "llama",
}


def pair(name: str, root: Path) -> tuple[Path, Path]:
    """Write a model twice, as safetensors and as torch's files."""
    plain, torch = root / "plain", root / "torch"
    shutil.copytree(TWINS[name], plain, ignore=shutil.ignore_patterns("*.bin", "*.npz"))
    weights = shutil.ignore_patterns("*.safetensors", "*.npz")
    shutil.copytree(FIXTURES / "torch" / name, torch, ignore=weights)
    shutil.copy(plain / "config.json", torch)
    return plain, torch


@pytest.mark.parametrize("name", sorted(TWINS))
@pytest.mark.parametrize("how", [{}, {"dtype": "bfloat16"}])
def test_a_torch_checkpoint_converts_to_the_files_of_its_twin(
    tmp_path: Path, name: str, how: dict[str, Any]
) -> None:
    plain, torch = pair(name, tmp_path)
    first = convert(str(plain), tmp_path / "first", **how).path
    second = convert(str(torch), tmp_path / "second", **how).path
    wanted, found = listing(first), listing(second)
    assert wanted.keys() == found.keys()
    kept = [key for key in wanted if "safetensors" not in key and key != "provenance.json"]
    assert all(wanted[key] == found[key] for key in kept)
    assert same(tensors(first), tensors(second))
    results = [provenance(path)["result"] for path in (first, second)]
    for key in ("tensors", "parameters", "bytes"):
        assert results[0][key] == results[1][key]


def test_a_llama_of_torch_computes_what_transformers_does_before_and_after(tmp_path: Path) -> None:
    _, torch = pair("llama", tmp_path)
    convert(str(torch), tmp_path / "out")
    for directory in (torch, tmp_path / "out"):
        expected = FIXTURES / "torch" / "llama" / "expected.npz"
        assert distance(letters(directory, 64), expected) < 1e-4


def test_experts_that_mlx_lm_joins_come_out_as_from_safetensors(tmp_path: Path) -> None:
    plain, source = tiny.write("mixtral", tmp_path / "plain"), tmp_path / "torch"
    weights = tensors(plain)
    names = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    for key in [key for key in weights if "switch_mlp" in key]:
        prefix, _, part = key.removesuffix(".weight").rpartition(".switch_mlp.")
        for number, expert in enumerate(weights.pop(key)):
            weights[f"{prefix}.experts.{number}.{names[part]}.weight"] = mx.contiguous(expert)
    source.mkdir()
    save_torch(source / "pytorch_model.bin", weights)
    shutil.copy(plain / "config.json", source)
    first = convert(str(plain), tmp_path / "first").path
    done = command("convert", "--model", source, "--mlx-path", tmp_path / "second")
    assert done.code == 0 and "joined into" in done.err
    assert same(tensors(first), tensors(tmp_path / "second"))
    report = provenance(tmp_path / "second")["result"]
    assert report["largest_difference_of_log_probabilities"] == 0
    assert listing(first).keys() == listing(tmp_path / "second").keys()
