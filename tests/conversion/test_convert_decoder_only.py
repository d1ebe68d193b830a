"""Conversion of decoder-only models: what is written is what mlx-lm itself would write."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec.checkpoints import files, shards
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare_logits
from mlx_specdec.errors import CheckpointError
from mlx_specdec.models.loading import load_model
from mlx_specdec.models.mlx_lm.mends import mend

from ..support import tiny
from ..support.checkpoints import listing, refusal, save
from ..support.models import distance
from ..support.torch_files import save_torch

TOKENS = mx.array([[3, 14, 15, 9, 26, 5]])


def logits(directory: Path) -> mx.array:
    model, _ = mlx_lm.utils.load_model(directory)
    return model(TOKENS)


def mlx_lm_conversion(source: Path, target: Path, **how: int) -> Path:
    """Convert a model with mlx-lm's own functions."""
    model, config = mlx_lm.utils.load_model(source, lazy=True)
    if how:
        model, config = mlx_lm.utils.quantize_model(model, config, how["group_size"], how["bits"])
    mlx_lm.utils.save_model(target, model)
    mlx_lm.utils.save_config(config, target / "config.json")
    return target


@pytest.mark.parametrize("name", ["llama", "gemma3_wrapped", "mixtral", "phi3", "mamba2"])
@pytest.mark.parametrize("how", [{}, {"group_size": 32, "bits": 4}])
def test_the_result_is_what_mlx_lm_writes(
    tmp_path: Path, name: str, how: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny.write(name, tmp_path / "source")
    reference = mlx_lm_conversion(source, tmp_path / "theirs", **how)
    capsys.readouterr()
    options: dict[str, Any] = {}
    if how:
        options = {"quantize": True, "q_bits": how["bits"], "q_group_size": how["group_size"]}
    result = convert(str(source), tmp_path / "ours", **options).path
    expected, found = dict(files.tensors(reference)), dict(files.tensors(result))
    assert expected.keys() == found.keys()
    for key, array in expected.items():
        assert array.dtype == found[key].dtype and mx.array_equal(array, found[key])
    assert json.loads((result / "config.json").read_text()) == json.loads(
        (reference / "config.json").read_text()
    )
    index, expected_index = (
        json.loads((directory / shards.INDEX).read_text()) for directory in (result, reference)
    )
    assert index["weight_map"] == expected_index["weight_map"]
    assert index["metadata"]["total_size"] == expected_index["metadata"]["total_size"]
    if name != "mamba2":  # mlx-lm does not count what lies outside a leaf module, as A_log does
        assert index["metadata"] == expected_index["metadata"]
    assert mx.array_equal(logits(result), logits(reference))
    assert capsys.readouterr().out == ""


def test_layers_that_mlx_lm_keeps_wider_are_recorded(tmp_path: Path) -> None:
    source = tiny.write(
        "qwen3_moe", tmp_path / "source", hidden_size=64, head_dim=16, moe_intermediate_size=64
    )
    report = convert(str(source), tmp_path / "out", quantize=True, q_bits=4, q_group_size=64)
    entry = json.loads((report.path / "config.json").read_text())["quantization"]
    assert entry["model.layers.0.mlp.gate"] == {"bits": 8, "group_size": 64}
    assert any("mlp.gate" in note for note in report.notes)
    assert mx.all(mx.isfinite(logits(report.path))).item()


def change_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def drop(directory: Path, name: str) -> None:
    weights = {key: mx.array(array) for key, array in files.tensors(directory) if key != name}
    mx.eval(weights)
    save(directory / "model.safetensors", weights)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda source: change_config(source, model_type="warp_drive"), "warp_drive"),
        (lambda source: change_config(source, model_file="evil.py"), "evil.py"),
        (lambda source: change_config(source, hidden_size="x"), "does not describe a model"),
        (lambda source: change_config(source, num_hidden_layers=5), "model.layers.2"),
        (lambda source: drop(source, "model.norm.weight"), "model.norm.weight"),
        (
            lambda source: (source / "model.safetensors").rename(source / "x.safetensors"),
            "starts with model",
        ),
    ],
)
def test_a_bad_source_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, harm: Any, says: str
) -> None:
    source = tiny.write("llama", tmp_path / "source")
    harm(source)
    before = listing(tmp_path)
    assert says in refusal(CheckpointError, convert, str(source), tmp_path / "out")
    assert listing(tmp_path) == before


def test_mlx_lm_loads_the_result_with_its_tokenizer(tmp_path: Path) -> None:
    script = (
        "from tokenizers import Tokenizer, models\n"
        "t = Tokenizer(models.WordLevel({f'w{i}': i for i in range(64)}, unk_token='w0'))\n"
        f"t.save({str(tmp_path / 'tokenizer.json')!r})\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    source = tiny.write("llama", tmp_path / "source")
    (tmp_path / "tokenizer.json").rename(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w1"})
    )
    report = convert(str(source), tmp_path / "out", quantize=True, q_group_size=32)
    model, tokenizer = mlx_lm.load(str(report.path))[:2]
    assert tokenizer.encode("w5") == [5]
    assert mx.all(mx.isfinite(model(TOKENS))).item()


# Heads that differ from a tied embedding


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
    network, full_config = mlx_lm.utils.load_model(report.path)
    mend(network, full_config)
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


# Torch archives


FIXTURES = Path(__file__).parents[1] / "fixtures"
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
    convert(str(torch), tmp_path / "out")
    for directory in (torch, tmp_path / "out"):
        assert distance(directory, FIXTURES / "torch" / "llama" / "expected.npz") < 1e-4


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
