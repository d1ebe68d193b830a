"""Inspecting shows what the files of a checkpoint have, in every format, converted or not."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import convert

from ..support.checkpoints import write_t5
from .converted import change_config, provenance, tensors
from .support import ROOT, command

FIXTURES = ROOT / "tests" / "fixtures"


def inspected(path: Path | str) -> dict[str, Any]:
    done = command("inspect", path, "--json")
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


@pytest.mark.parametrize(
    ("place", "format", "model_type", "quantized"),
    [
        ("t5/mt5", "safetensors", "mt5", None),
        ("torch/llama", "safetensors", "llama", None),
        ("gguf/llama-q4_0.gguf", "GGUF", "llama", "Q4_0"),
        ("gguf/t5-f16.gguf", "GGUF", "t5", None),
    ],
)
def test_every_format_is_distinguished_and_agrees_with_its_conversion(
    tmp_path: Path, place: str, format: str, model_type: str, quantized: str | None
) -> None:
    found, out = inspected(FIXTURES / place), tmp_path / "out"
    assert (found["format"], found["model_type"], found["problem"]) == (format, model_type, None)
    assert found["quantization"] == quantized
    convert(str(FIXTURES / place), out)
    result, report = inspected(out), provenance(out)
    assert found["parameters"] == result["parameters"] == report["result"]["parameters"]
    assert result["bytes"] == report["result"]["bytes"]
    names = {name for name in tensors(out) if not name.endswith((".scales", ".biases"))}
    assert {row["becomes"] for row in found["tensors"]} - {""} == names
    assert found["tied"] == report["tensors"]["tied"]
    assert found["dropped"] == report["tensors"]["dropped"]


def test_tensors_that_share_their_bytes_in_an_archive_are_counted_once() -> None:
    found = inspected(FIXTURES / "torch" / "old-t5" / "pytorch_model.bin")
    assert found["bytes"] < sum(row["nbytes"] for row in found["tensors"])
    assert any(row["note"].startswith("the bytes of") for row in found["tensors"])
    assert found["bytes"] <= sum(found["files"].values())


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"model_type": "warp_drive"}, "warp_drive"), ({"d_ff": 65}, "config.json asks for")],
)
def test_what_cannot_be_converted_is_shown_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    found = inspected(change_config(write_t5(tmp_path / "t5"), **changes))
    assert says in found["problem"] and len(found["tensors"]) > 10


def test_damage_and_nothing_at_all_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes(b"1234")
    (tmp_path / "empty").mkdir()
    for name, says in {
        "nothing": "there is no directory",
        "empty": "no weights",
        "notes.txt": "no format",
        "cut.safetensors": "truncated",
    }.items():
        command("inspect", tmp_path / name).refuses(says)
