"""What is written, read back and told: aligned, whole, and no more than was asked for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_specdec.checkpoints import destination
from mlx_specdec.checkpoints.files import Weights
from mlx_specdec.checkpoints.quantization import Quantization
from mlx_specdec.checkpoints.tensors import Tensor
from mlx_specdec.checkpoints.writer import Change, write_weights
from mlx_specdec.conversion.convert import convert
from mlx_specdec.conversion.verify import compare
from mlx_specdec.errors import CheckpointError, OutputError

from ..support.checkpoints import T5, t5_weights, write_t5

PAIRS = {name: Tensor.of(mx.arange(6, dtype=mx.float32).reshape(2, 3)) for name in "ab"}


def unchanged(name: str, tensor: Tensor) -> Change:
    return Change()


@pytest.mark.parametrize(
    ("written", "asked", "says"),
    [("ab", "a", "b should not be there"), ("a", "ab", "b is missing")],
)
def test_the_result_has_what_was_asked_for_and_no_more(
    tmp_path: Path, written: str, asked: str, says: str
) -> None:
    pairs = [(name, PAIRS[name]) for name in written]
    write_weights(tmp_path, pairs, unchanged, shard_bytes=1000)
    assert compare(Weights(tmp_path), pairs, unchanged).tensors == len(written)
    with pytest.raises(OutputError, match=says):
        compare(Weights(tmp_path), [(name, PAIRS[name]) for name in asked], unchanged)


@pytest.mark.parametrize("place", range(8))
def test_the_smallest_damage_to_a_quantized_matrix_is_found(tmp_path: Path, place: int) -> None:
    change = Change(quantization=Quantization(8, 32))
    pairs = [("a.weight", Tensor.of(mx.random.normal((8, 32), key=mx.random.key(1))))]
    write_weights(tmp_path, pairs, lambda name, tensor: change, shard_bytes=10_000)
    assert compare(Weights(tmp_path), pairs, lambda name, tensor: change).quantized > 0
    file = tmp_path / "model.safetensors"
    data = bytearray(file.read_bytes())
    length = int.from_bytes(data[:8], "little")
    begin = json.loads(data[8 : 8 + length])["a.weight"]["data_offsets"][0]
    data[8 + length + begin + place] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(OutputError, match=r"a\.weight differs from its source"):
        compare(Weights(tmp_path), pairs, lambda name, tensor: change)


def test_every_tensor_lies_where_its_type_may(tmp_path: Path) -> None:
    kinds = {"a": mx.uint8, "b": mx.float32, "c": mx.float16, "d": mx.int64}
    pairs = [(name, Tensor.of(mx.ones((3,), dtype=kind))) for name, kind in kinds.items()]
    write_weights(tmp_path, pairs, unchanged, shard_bytes=1000)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    for name, kind in kinds.items():
        assert header[name]["data_offsets"][0] % kind.size == 0


def test_room_is_asked_for_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    destination.check_room(tmp_path / "out", 100)
    with pytest.raises(OutputError, match="101 bytes, and its disk has 100 bytes free"):
        destination.check_room(tmp_path / "out", 101)


@pytest.mark.parametrize("change", [{"bits": 4}, {"group_size": 64}])
def test_packings_that_are_not_as_config_json_says_are_not_unpacked(
    tmp_path: Path, change: dict[str, int]
) -> None:
    packed = tmp_path / "packed"
    source = str(write_t5(tmp_path / "t5"))
    convert(source, packed, quantize=True, q_bits=8, q_group_size=32)
    config = json.loads((packed / "config.json").read_text())
    config["quantization"] |= change
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"is not quantized as config\.json says"):
        convert(str(packed), tmp_path / "out", dequantize=True)


def test_a_twin_of_the_embedding_that_is_no_copy_is_not_called_one(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    shared = weights["shared.weight"]
    twins = {"encoder.embed_tokens.weight": shared + 1, "decoder.embed_tokens.weight": shared}
    source = write_t5(tmp_path / "t5", weights={**weights, **twins})
    report = convert(str(source), tmp_path / "out").tensor_report
    assert report.tied == {"decoder.embed_tokens.weight": "shared.weight"}
    assert report.dropped.keys() == {"encoder.embed_tokens.weight"}
    assert "no copy" in report.dropped["encoder.embed_tokens.weight"]
