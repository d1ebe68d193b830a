"""Files of a checkpoint: shards, their index, and links to other places."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec import CheckpointError, convert

from ..support.checkpoints import save, write_index, write_sharded_t5, write_t5
from .converted import refused, same, tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_sharded_t5(tmp_path / "many")


@pytest.mark.parametrize("missing", [1, 2, 3])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_missing_shard_is_named(directory: Path, missing: int, with_index: bool) -> None:
    name = f"model-{missing:05d}-of-00003.safetensors"
    (directory / name).unlink()
    if not with_index:
        (directory / INDEX).unlink()
    assert name in refused(CheckpointError, directory)


def test_a_key_that_is_not_in_the_shard_the_index_says_is_named(directory: Path) -> None:
    places = json.loads((directory / INDEX).read_text())["weight_map"]
    write_index(directory, {**places, "ghost.weight": "model-00001-of-00003.safetensors"})
    assert "ghost.weight" in refused(CheckpointError, directory)
    other = next(file for file in places.values() if file != places["shared.weight"])
    write_index(directory, {**places, "shared.weight": other})
    assert "shared.weight" in refused(CheckpointError, directory)


def test_a_key_in_two_shards_is_named_with_the_file(directory: Path) -> None:
    file = directory / "model-00002-of-00003.safetensors"
    arrays = {key: mx.array(value) for key, value in mx.load(str(file)).items()}
    name = next(iter(mx.load(str(directory / "model-00001-of-00003.safetensors"))))
    mx.eval(arrays)
    save(file, {**arrays, name: mx.zeros((1,))})
    text = refused(CheckpointError, directory)
    assert name in text and file.name in text


@pytest.mark.parametrize("with_index", [True, False])
def test_weights_may_be_links_to_another_place(directory: Path, with_index: bool) -> None:
    expected = tensors(directory)
    mx.eval(expected)
    for shard in directory.glob("*.safetensors"):
        shard.rename(directory.parent / f"drive-{shard.name}")
        shard.symlink_to(directory.parent / f"drive-{shard.name}")
    if not with_index:
        (directory / INDEX).unlink()
    convert(str(directory), directory.parent / "out")
    assert same(tensors(directory.parent / "out"), expected)


def test_tokenizer_files_may_be_links_to_files_of_their_names_alone(tmp_path: Path) -> None:
    """Otherwise a stranger's model could carry the user's own files to where it is uploaded."""
    source = write_t5(tmp_path / "t5")
    (tmp_path / "vocab.txt").write_text("a")
    (source / "vocab.txt").symlink_to("../vocab.txt")
    convert(str(source), tmp_path / "out")
    assert (tmp_path / "out" / "vocab.txt").read_text() == "a"
    (tmp_path / "secret").write_bytes(b"key")
    (source / "vocab.txt").unlink()
    (source / "vocab.txt").symlink_to("../secret")
    text = refused(CheckpointError, source)
    assert "vocab.txt is a link out of its directory" in text
