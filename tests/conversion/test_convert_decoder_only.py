"""Conversion of decoder-only models: what is written is what mlx-lm itself would write."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest

from mlx_specdec.checkpoints import files, shards
from mlx_specdec.conversion.convert import convert
from mlx_specdec.errors import CheckpointError

from ..support import tiny
from ..support.checkpoints import listing, save

TOKENS = mx.array([[3, 14, 15, 9, 26, 5]])


def logits(directory: Path) -> mx.array:
    model, _ = mlx_lm.utils.load_model(directory)
    return model(TOKENS)


def mlx_lm_conversion(source: Path, target: Path, **how: int) -> Path:
    """What mlx-lm's converter does once it has loaded the model."""
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
    with pytest.raises(CheckpointError) as caught:
        convert(str(source), tmp_path / "out")
    assert says in str(caught.value) and "\n" not in str(caught.value)
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
