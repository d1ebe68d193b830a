"""Inspecting shows what the files of a checkpoint hold, in every format, converted or not."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import __version__
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.inspect import Inspection, inspect
from mlx_specdec.errors import CheckpointError, SourceError
from mlx_specdec.models.t5 import TWINS, UNUSED

from ..support.checkpoints import T5, t5_weights, write_sharded_t5, write_t5

FIXTURES = Path(__file__).parents[1] / "fixtures"
BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def row(found: Inspection, name: str) -> Any:
    return next(row for row in found.tensors if row.name == name)


@pytest.mark.parametrize(
    ("place", "format", "model_type", "quantized"),
    [
        ("t5/mt5", "safetensors", "mt5", ""),
        ("torch/llama", "safetensors", "llama", ""),
        ("gguf/llama-q4_0.gguf", "GGUF", "llama", "Q4_0"),
        ("gguf/t5-f16.gguf", "GGUF", "t5", ""),
    ],
)
def test_every_format_is_distinguished_and_agrees_with_its_conversion(
    tmp_path: Path, place: str, format: str, model_type: str, quantized: str
) -> None:
    found = inspect(str(FIXTURES / place))
    assert (found.format, found.model_type, found.problem) == (format, model_type, "")
    assert quantized in found.quantization and bool(quantized) is bool(found.quantization)
    report = convert(str(FIXTURES / place), tmp_path / "out")
    assert found.parameters == report.parameters
    result = inspect(str(tmp_path / "out"))
    assert result.parameters == report.parameters and result.nbytes == report.nbytes
    names = {row.name for row in result.tensors if not row.name.endswith((".scales", ".biases"))}
    assert {row.becomes for row in found.tensors} - {""} == names
    assert report.tensor_report == found.tensor_report


def test_tied_and_dropped_tensors_are_named_with_the_reason(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    weights.update(dict.fromkeys(("lm_head.weight", *TWINS), weights["shared.weight"] + 0))
    weights[BIAS] = mx.zeros((8, 4))
    source = write_t5(tmp_path / "t5", weights=weights)
    found = inspect(str(source))
    assert found.tensor_report is not None
    assert found.tensor_report.tied == dict.fromkeys(
        sorted(("lm_head.weight", *TWINS)), "shared.weight"
    )
    assert found.tensor_report.dropped == {BIAS: UNUSED}
    assert row(found, BIAS).note == f"dropped: {UNUSED}"
    assert found.bits_per_weight == 32 and found.nbytes > found.kept_nbytes


def test_tensors_that_share_their_bytes_in_an_archive_are_counted_once() -> None:
    found = inspect(str(FIXTURES / "torch" / "old-t5" / "pytorch_model.bin"))
    assert found.nbytes < sum(row.nbytes for row in found.tensors)
    shared = [row for row in found.tensors if row.note.startswith("the bytes of")]
    assert shared and found.nbytes <= sum(found.files.values())


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda config: config.update(model_type="warp_drive"), "warp_drive"),
        (lambda config: config.update(d_ff=65), "config.json asks for"),
    ],
)
def test_what_cannot_be_converted_is_shown_and_the_reason_reported(
    tmp_path: Path, harm: Any, says: str
) -> None:
    source = write_t5(tmp_path / "t5")
    config = {**T5}
    harm(config)
    (source / "config.json").write_text(json.dumps(config))
    found = inspect(str(source))
    assert says in found.problem and found.tensor_report is None and len(found.tensors) > 10


def test_a_single_file_of_tensors_is_shown_without_a_configuration(tmp_path: Path) -> None:
    found = inspect(str(write_t5(tmp_path / "t5") / "model.safetensors"))
    assert found.model_type == "" and "directory" in found.problem
    assert found.parameters == sum(array.size for array in t5_weights(T5).values())


def test_tokenizers_are_reported_also_where_they_are_made(tmp_path: Path) -> None:
    assert inspect(str(write_t5(tmp_path / "t5"))).tokenizer == "spiece.model"
    made = inspect(str(FIXTURES / "gguf" / "llama-f16.gguf")).tokenizer
    assert made.startswith("tokenizer.json") and "made from" in made


def test_damage_and_nothing_at_all_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="there is no directory"):
        inspect(str(tmp_path / "nothing"))
    with pytest.raises(CheckpointError, match="no weights"):
        inspect(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="no format"):
        inspect(str(tmp_path / "notes.txt"))
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    with pytest.raises(CheckpointError, match="truncated"):
        inspect(str(tmp_path / "cut.safetensors"))


# provenance.json says what was read, what became of it, and which bytes both sides have.


def provenance(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "provenance.json").read_text(encoding="utf-8"))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_digests_are_those_of_the_files_on_both_sides(tmp_path: Path) -> None:
    source = write_sharded_t5(tmp_path / "t5")
    report = convert(str(source), tmp_path / "out", shard_bytes=20_000)
    found = provenance(tmp_path / "out")
    for directory, side in ((source, "source"), (tmp_path / "out", "result")):
        files = found[side]["files"]
        weights = {file.name for file in directory.glob("*.safetensors")}
        assert weights | {"config.json"} <= files.keys()
        for name, entry in files.items():
            file = directory / name
            assert entry == {"bytes": file.stat().st_size, "sha256": sha256(file)}
        lines = "".join(f"{files[name]['sha256']}  {name}\n" for name in sorted(files))
        assert found[side]["digest"] == hashlib.sha256(lines.encode()).hexdigest()
    assert found["source"]["digest"][:16] in report.describe()
    assert found["result"]["digest"][:16] in report.describe()


def test_names_types_and_bits_are_reported_and_no_directory_of_this_machine(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "t5")
    report = convert(str(source), tmp_path / "out", quantize=True, q_group_size=32)
    found = provenance(tmp_path / "out")
    assert found["tool"] == f"mlx-specdec {__version__}"
    assert (found["source"]["name"], found["source"]["format"]) == ("t5", "safetensors")
    assert found["result"]["bits_per_weight"] == pytest.approx(report.bits_per_weight, abs=1e-4)
    assert "4-bit" in found["result"]["dtype"]
    assert str(tmp_path) not in (tmp_path / "out" / "provenance.json").read_text()
