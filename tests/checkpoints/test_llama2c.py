"""llama2.c's files, all three versions; and what a header can say that is not true."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec import Options, generate, load
from mlx_specdec.assemble import compare_logits
from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.convert import convert
from mlx_specdec.checkpoints.formats.meta.llama2c import Llama2cFile, is_llama2c
from mlx_specdec.errors import CheckpointError, SourceError

from .meta_makers import CLOSE, SMALL, copy_llama2c, distance

VERSIONS = ("legacy.bin", "v1.bin", "v2.bin")
GROUP, HEADER = 32, 256


def refusal(source: Path, out: Path) -> str:
    with pytest.raises((CheckpointError, SourceError)) as caught:
        convert(str(source), out)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 500 and str(source.parent) in text
    assert not out.exists()
    return text


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", VERSIONS)
def test_a_converted_file_computes_what_the_reference_does(tmp_path: Path, name: str) -> None:
    report = convert(str(SMALL / name), tmp_path / "out", compare_logits=compare_logits)
    assert report.logits == 0.0
    assert distance(report.path, (SMALL / name).with_suffix(".npz")) < CLOSE


@pytest.mark.parametrize("name", VERSIONS)
def test_configurations_say_what_the_header_does(tmp_path: Path, name: str) -> None:
    config = config_of(convert(str(SMALL / name), tmp_path / "out").path)
    assert (config["hidden_size"], config["intermediate_size"]) == (32, 40)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    assert (config["vocab_size"], config["max_position_embeddings"]) == (340, 64)
    assert config["tie_word_embeddings"] is (name == "v1.bin")
    assert config["eos_token_id"] == [1, 2] and config["bos_token_id"] == 1


def test_a_directory_with_one_model_is_taken_and_with_several_refused(tmp_path: Path) -> None:
    file = copy_llama2c("v1.bin", tmp_path / "model")
    out = convert(str(file.parent), tmp_path / "out").path
    assert (out / "tokenizer.json").is_file()
    shutil.copy(SMALL / "v2.bin", file.parent)
    text = refusal(file.parent, tmp_path / "other")
    assert "v1.bin, v2.bin" in text and "name the file" in text


@pytest.mark.parametrize("name", VERSIONS)
def test_the_report_says_what_was_expanded(tmp_path: Path, name: str) -> None:
    notes = " ".join(convert(str(SMALL / name), tmp_path / "out").notes)
    assert ("expanded Q8_0" in notes) == (name == "v2.bin")


def test_a_model_is_loaded_directly_and_writes_what_its_conversion_writes(tmp_path: Path) -> None:
    out = convert(str(SMALL / "v2.bin"), tmp_path / "out").path
    options = Options(max_tokens=12, temperature=0.0, regular=True)
    texts = {
        tuple(generate(load(str(model)), "Once upon a time", options).tokens)
        for model in (SMALL / "v2.bin", out)
    }
    assert len(texts) == 1


def test_what_is_laid_down_on_the_way_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    pair = load(str(copy_llama2c("v1.bin", tmp_path / "model")))
    assert len(list(scratch.iterdir())) == 1
    del pair
    gc.collect()
    assert not any(scratch.iterdir())
    convert(str(tmp_path / "model"), tmp_path / "out")
    (tmp_path / "model" / "tokenizer.bin").write_bytes(b"")
    with pytest.raises(CheckpointError):
        load(str(tmp_path / "model"))
    assert not any(scratch.iterdir())


def test_a_file_without_a_tokenizer_converts_and_says_so(tmp_path: Path) -> None:
    file = copy_llama2c("v1.bin", tmp_path / "model")
    (file.parent / "tokenizer.bin").unlink()
    report = convert(str(file), tmp_path / "out")
    assert "no tokenizer files" in report.describe()
    assert config_of(report.path)["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name", VERSIONS)
def test_any_rows_are_those_of_the_whole(name: str) -> None:
    model = Llama2cFile(SMALL / name)
    for ours, info in model.infos.items():
        whole = model.rows(ours, 0, info.extent)
        assert whole.shape == info.shape and whole.dtype == mx.float32
        for begin in range(0, info.extent, 7):
            end = min(begin + 3, info.extent)
            assert mx.array_equal(model.rows(ours, begin, end), whole[begin:end]).item()


def test_scales_behind_all_values_are_found_as_well(tmp_path: Path) -> None:
    data = (SMALL / "v2.bin").read_bytes()
    position = HEADER + 4 * 32 * 5
    values, scales = b"", b""
    sizes = [340 * 32, *[32 * 32] * 2, *[16 * 32] * 4, *[32 * 32] * 2, *[40 * 32] * 6, 340 * 32]
    for size in sizes:
        values += data[position : position + size]
        scales += data[position + size : position + size + size // GROUP * 4]
        position += size + size // GROUP * 4
    assert position == len(data)
    other = tmp_path / "apart.bin"
    other.write_bytes(data[: HEADER + 4 * 32 * 5] + values + scales)
    first, second = Llama2cFile(SMALL / "v2.bin"), Llama2cFile(other)
    for name, info in first.infos.items():
        pair = (model.rows(name, 0, info.extent) for model in (first, second))
        assert mx.array_equal(*pair).item()


def test_scales_that_are_none_are_refused(tmp_path: Path) -> None:
    data = bytearray((SMALL / "v2.bin").read_bytes())
    data[-4:] = struct.pack("<f", -1.0)
    file = tmp_path / "v2.bin"
    file.write_bytes(data)
    assert "scales" in refusal(file, tmp_path / "out")


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    data = bytearray((SMALL / "v1.bin").read_bytes())
    data[-4:] = struct.pack("<f", float("nan"))
    file = tmp_path / "v1.bin"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="no finite numbers"):
        convert(str(file), tmp_path / "out")


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("length", [0, 3, 4, 27, 28, 100, 255, 256, 5000, -1])
def test_a_truncated_file_is_one_sentence(tmp_path: Path, name: str, length: int) -> None:
    file = tmp_path / name
    file.write_bytes((SMALL / name).read_bytes()[:length])
    assert str(file) in refusal(file, tmp_path / "out")


@pytest.mark.parametrize("name", VERSIONS)
def test_a_file_that_goes_on_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_bytes((SMALL / name).read_bytes() + b"\0")
    assert "bytes and it has" in refusal(file, tmp_path / "out")


@pytest.mark.parametrize("place", range(7))
@pytest.mark.parametrize("value", [0, -1, 3, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", VERSIONS)
def test_an_absurd_header_is_one_sentence(
    tmp_path: Path, name: str, place: int, value: int
) -> None:
    data = bytearray((SMALL / name).read_bytes())
    struct.pack_into("<i", data, (0 if name == "legacy.bin" else 8) + 4 * place, value)
    file = tmp_path / name
    file.write_bytes(data)
    if place == 6 and value > 0 and name != "legacy.bin":
        # How many positions there may be follows from nothing else in these versions.
        assert Llama2cFile(file).config["max_position_embeddings"] == value
        return
    assert str(file) in refusal(file, tmp_path / "out")


@pytest.mark.parametrize("group", [0, -1, 33, 2**31 - 1, 7])
def test_groups_that_cannot_be_are_refused(tmp_path: Path, group: int) -> None:
    data = bytearray((SMALL / "v2.bin").read_bytes())
    struct.pack_into("<i", data, 37, group)
    file = tmp_path / "v2.bin"
    file.write_bytes(data)
    assert "group" in refusal(file, tmp_path / "out")


def test_an_unknown_version_is_named(tmp_path: Path) -> None:
    data = bytearray((SMALL / "v1.bin").read_bytes())
    struct.pack_into("<i", data, 4, 3)
    file = tmp_path / "v3.bin"
    file.write_bytes(data)
    assert "version 3" in refusal(file, tmp_path / "out")


def test_other_files_called_bin_are_told_apart(tmp_path: Path) -> None:
    torch = Path(__file__).parents[1] / "fixtures" / "torch"
    for name in ("every.zip.bin", "every.old.bin"):
        assert "torch's own" in refusal(torch / name, tmp_path / "out")
        assert not is_llama2c(torch / name)
    assert not is_llama2c(SMALL / "tokenizer.bin")
    assert not is_llama2c(tmp_path)


def test_torchs_archives_come_before_llama2cs(tmp_path: Path) -> None:
    torch = Path(__file__).parents[1] / "fixtures" / "torch" / "llama"
    shutil.copytree(torch, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copy(SMALL / "v1.bin", tmp_path / "model")
    out = convert(str(tmp_path / "model"), tmp_path / "out").path
    assert files.headers(out)["model.embed_tokens.weight"].shape == (64, 32)


def test_values_are_those_in_the_file_in_its_order() -> None:
    data = np.frombuffer((SMALL / "legacy.bin").read_bytes(), "<f4", offset=28)
    model = Llama2cFile(SMALL / "legacy.bin")
    embedding = np.array(model.rows("model.embed_tokens.weight", 0, 340))
    assert np.array_equal(embedding.ravel(), data[: 340 * 32])
    assert np.array_equal(np.array(model.rows("lm_head.weight", 0, 340)).ravel(), data[-340 * 32 :])


@given(st.sampled_from(VERSIONS), st.data())
@settings(max_examples=300, deadline=None)
def test_any_damage_is_at_worst_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, name: str, data: st.DataObject
) -> None:
    whole = bytearray((SMALL / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 60) | st.integers(0, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    file = tmp_path_factory.mktemp("fuzz") / name
    file.write_bytes(whole[: data.draw(st.just(len(whole)) | st.integers(0, len(whole)))])
    try:
        model = Llama2cFile(file)
        for ours, info in model.infos.items():
            assert model.rows(ours, 0, info.extent).shape == info.shape
    except CheckpointError as problem:
        assert "\n" not in str(problem) and len(str(problem)) < 400


def test_scales_that_overflow_are_told_as_damage_alone(tmp_path: Path) -> None:
    source = Path(
        shutil.copy(Path(__file__).parents[1] / "fixtures" / "llama2c" / "v2.bin", tmp_path)
    )
    data = bytearray(source.read_bytes())
    model = Llama2cFile(source)
    place = model._places["model.layers.0.mlp.up_proj.weight"].scales
    assert place is not None
    struct.pack_into("<f", data, place, 3e38)
    source.write_bytes(data)
    with pytest.raises(CheckpointError, match="no finite numbers"):  # warnings are errors in tests
        convert(str(source), tmp_path / "out")
