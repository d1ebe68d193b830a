from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import (
    T5,
    raw_file,
    save,
    t5_weights,
    write_index,
    write_sharded_t5,
    write_t5,
)

INDEX = "model.safetensors.index.json"


def sentence(directory: Path, what: Any = files.Weights) -> str:
    with pytest.raises(CheckpointError) as caught:
        what(directory)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_one_file_and_shards_give_the_same_tensors(tmp_path: Path) -> None:
    single = dict(files.tensors(write_t5(tmp_path / "one")))
    sharded = dict(files.tensors(write_sharded_t5(tmp_path / "many")))
    assert single.keys() == sharded.keys() == t5_weights(T5).keys()
    assert all(mx.array_equal(single[name], sharded[name]) for name in single)


def test_shards_without_an_index_are_read(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    (directory / INDEX).unlink()
    assert dict(files.tensors(directory)).keys() == t5_weights(T5).keys()


def test_reading_a_tensor_twice_gives_it_twice(tmp_path: Path) -> None:
    weights = files.Weights(write_t5(tmp_path / "t5"))
    first, second = weights.read("shared.weight"), weights.read("shared.weight")
    assert first is not second and mx.array_equal(first, second)


def test_nothing_is_kept_of_tensors_that_the_caller_let_go(tmp_path: Path) -> None:
    size, count = 1 << 20, 16
    directory = tmp_path / "big"
    directory.mkdir()
    save(
        directory / "model.safetensors",
        {f"t{index}": mx.full((size // 4,), index, dtype=mx.float32) for index in range(count)},
    )
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _, array in files.tensors(directory):
        mx.eval(array)
        del array
        mx.clear_cache()
    assert mx.get_peak_memory() - before < 4 * size


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(tmp_path: Path, missing: int, with_index: bool) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    name = f"model-{missing:05d}-of-00003.safetensors"
    (directory / name).unlink()
    if not with_index:
        (directory / INDEX).unlink()
    assert name in sentence(directory)


def test_a_key_that_is_not_in_the_shard_the_index_says_is_named(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    places = json.loads((directory / INDEX).read_text())["weight_map"]
    write_index(directory, {**places, "ghost.weight": "model-00001-of-00003.safetensors"})
    assert "ghost.weight" in sentence(directory)
    moved = dict(places)
    moved["shared.weight"] = next(
        file for file in places.values() if file != places["shared.weight"]
    )
    write_index(directory, moved)
    assert "shared.weight" in sentence(directory)


def test_a_key_in_two_shards_is_named_with_the_file(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    file = directory / "model-00002-of-00003.safetensors"
    arrays = dict(mx.load(str(file)))
    name = next(iter(mx.load(str(directory / "model-00001-of-00003.safetensors"))))
    save(file, {**{key: mx.array(value) for key, value in arrays.items()}, name: mx.zeros((1,))})
    text = sentence(directory)
    assert name in text and file.name in text


@pytest.mark.parametrize(
    "name",
    [
        "../../x.safetensors",
        "/etc/passwd.safetensors",
        "sub/x.safetensors",
        "sub\\x.safetensors",
        "..",
        "",
        "config.json",
        "a\0.safetensors",
        7,
        None,
        ["x"],
    ],
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, name: Any) -> None:
    directory = write_t5(tmp_path / "deep" / "t5")
    save(tmp_path / "x.safetensors", {"shared.weight": mx.zeros((2, 2))})
    write_index(directory, {"shared.weight": name})
    assert "no safetensors file of its directory" in sentence(directory)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', "\x00", "NaN"])
def test_a_broken_index_is_one_sentence(tmp_path: Path, content: str) -> None:
    directory = write_t5(tmp_path / "t5")
    (directory / INDEX).write_text(content)
    assert INDEX in sentence(directory)


def test_a_directory_with_another_format_says_which(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in sentence(tmp_path)


def test_damage_is_told_before_the_first_tensor(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    raw_file(directory / "model-00003-of-00003.safetensors", b"{", b"")
    with pytest.raises(CheckpointError, match="00003-of-00003"):
        next(files.tensors(directory))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no config.json"),
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "no model_type"),
        ('{"model_type": 3}', "no model_type"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_config_says_what_is_wrong(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert says in sentence(tmp_path, files.read_config)


def test_a_config_that_is_not_text_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "not JSON" in sentence(tmp_path, files.read_config)


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    assert files.eos_token_ids(tmp_path, {"eos_token_id": 4}) == (4,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert files.eos_token_ids(tmp_path, {"eos_token_id": 4}) == (2, 3)
    assert files.eos_token_ids(tmp_path / "none", {}) == ()


def test_an_eos_that_is_no_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id"):
        files.eos_token_ids(tmp_path, {"eos_token_id": "</s>"})


def test_tokenizer_files_are_listed_and_nothing_else(tmp_path: Path) -> None:
    wanted = ["generation_config.json", "merges.txt", "spiece.model", "tokenizer.json"]
    for name in [*wanted, "config.json", "model.safetensors", "tokenizer.py", "README.md"]:
        (tmp_path / name).write_text("x")
    assert [file.name for file in files.tokenizer_files(tmp_path)] == wanted


def test_a_shard_that_is_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    shard = directory / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert "is a link out of its directory" in sentence(directory)


def test_a_shard_that_is_a_link_within_the_directory_is_read(tmp_path: Path) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    shard = directory / "model-00002-of-00003.safetensors"
    shard.rename(directory / "data")
    shard.symlink_to("data")
    (tmp_path / "link").symlink_to(directory)
    assert dict(files.tensors(tmp_path / "link")).keys() == t5_weights(T5).keys()


def test_a_tokenizer_file_that_leads_to_the_users_own_files_is_not_carried(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "t5")
    (tmp_path / "secret").write_bytes(b"key")
    (directory / "vocab.txt").symlink_to("../secret")
    assert "vocab.txt is a link out of its directory" in sentence(directory, files.tokenizer_files)
