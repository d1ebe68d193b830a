"""Files that real torch wrote (tests/fixtures/make_torch.py), read without it."""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import files
from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.checkpoints.tensors import DTYPES
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import T5, t5_weights, write_t5
from ..support.torch_files import Name, encode, save_torch, tensor, write_old, write_zip

FIXTURES = Path(__file__).parents[1] / "fixtures" / "torch"
EVERY = ["every.zip.bin", "every.old.bin", "every.zip3.bin", "every.zip4.bin", "every.zip5.bin"]
STORED = {
    "float64": "F32",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}


def expected(name: str) -> mx.array:
    values = np.load(FIXTURES / "every.npz")[name]
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return mx.array(values).view(mx.bfloat16) if name == "bfloat16" else mx.array(values)


def whole(file: TorchFile, name: str) -> mx.array:
    return file.rows(name, 0, file.infos[name].extent)


@pytest.mark.parametrize("name", [*EVERY, "nested.bin"])
def test_every_type_and_view_has_the_values_that_torch_gave_it(name: str) -> None:
    file = TorchFile(FIXTURES / name)
    assert file.infos.keys() == set(np.load(FIXTURES / "every.npz"))
    for key, info in file.infos.items():
        array, wanted = whole(file, key), expected(key)
        assert array.dtype == wanted.dtype == DTYPES[info.dtype]
        assert info.dtype == STORED.get(key, "F32")
        assert info.shape == array.shape == wanted.shape and info.nbytes == array.nbytes
        assert mx.array_equal(array, wanted).item()


def test_a_big_endian_archive_has_the_same_values() -> None:
    file = TorchFile(FIXTURES / "big.bin")
    assert len(file.infos) == 7
    for key in file.infos:
        assert mx.array_equal(whole(file, key), expected(key)).item()


@pytest.mark.parametrize("name", EVERY)
def test_rows_are_a_part_of_the_whole(name: str) -> None:
    file = TorchFile(FIXTURES / name)
    for key, info in file.infos.items():
        array = whole(file, key)
        for begin in range(info.extent if info.shape else 0):
            for end in range(begin, info.extent + 1):
                part = file.rows(key, begin, end)
                assert part.dtype == array.dtype and part.shape == array[begin:end].shape
                assert mx.array_equal(part, array[begin:end]).item()


def test_a_read_tensor_outlives_its_file(tmp_path: Path) -> None:
    copy = Path(shutil.copy(FIXTURES / "every.zip.bin", tmp_path / "x.bin"))
    array = whole(TorchFile(copy), "base")
    copy.unlink()
    assert mx.array_equal(array, expected("base")).item()


def test_nothing_of_a_storage_is_read_for_the_list_of_tensors(tmp_path: Path) -> None:
    size = 1 << 30
    value = {"big": tensor(count=size, shape=(size,), strides=(1,), old=True)}
    file = write_old(tmp_path / "big.bin", value, {"0": (size, b"")})
    os.truncate(file, file.stat().st_size + 4 * size)
    found = TorchFile(file)
    assert found.infos["big"].nbytes == 4 * size
    assert mx.array_equal(found.rows("big", size - 2, size), mx.zeros(2)).item()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
        (b"<!DOCTYPE html>", "no file that torch.save wrote"),
        (struct.pack("<7i", 288, 768, 6, 6, 6, 32000, 256), "no file that torch.save wrote"),
        (b"\x80\x02}q\x00.", "none that torch.save wrote"),
        (b"\x80\x02", "truncated"),
        (b"PK\x03\x04", "truncated"),
        (bytes(257) + b"ustar" + bytes(250), "before 0.2"),
    ],
)
def test_what_is_no_archive_is_told_in_one_line(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TorchFile(file)
    assert says in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_safetensors_are_preferred_where_both_are_there(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "t5")
    write_zip(directory / "pytorch_model.bin", b"broken")
    assert files.Weights(directory).infos.keys() == t5_weights(T5).keys()


def test_other_safetensors_do_not_hide_torchs_weights(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    save_torch(tmp_path / "pytorch_model.bin", weights)
    mx.save_safetensors(str(tmp_path / "adapter.safetensors"), {"a": mx.zeros(2)})
    assert files.Weights(tmp_path).infos.keys() == weights.keys()


def test_archives_made_by_hand_read_as_those_of_torch(tmp_path: Path) -> None:
    weights = t5_weights(T5)
    file = TorchFile(save_torch(tmp_path / "x.bin", weights))
    assert file.infos.keys() == weights.keys()
    assert all(mx.array_equal(whole(file, name), weights[name]).item() for name in weights)


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    """Its texts are bytes, and an OrderedDict is a call with a list of pairs."""
    pairs = b"](](U\x01w" + encode(tensor()) + b"ee"
    text = encode(Name("collections", "OrderedDict")) + pairs + b"\x85R"
    file = TorchFile(write_zip(tmp_path / "x.bin", b"\x80\x02" + text + b".", {"0": bytes(24)}))
    assert file.infos["w"].shape == (2, 3)


def test_an_archive_with_64_bit_places_is_read(tmp_path: Path) -> None:
    """As archives beyond 4 GB have them; every place and size moved into the 64-bit fields."""
    values = np.arange(6, dtype=np.float32)
    content = write_zip(tmp_path / "x.bin", {"w": tensor()}, {"0": values.tobytes()}).read_bytes()
    end = content.rfind(b"PK\x05\x06")
    count, size, begin = struct.unpack("<H2L", content[end + 10 : end + 20])
    wide, at = b"", begin
    for _ in range(count):
        entry = bytearray(content[at : at + 46])
        packed, nbytes, name = struct.unpack("<2LH", entry[20:30])
        place = struct.unpack("<L", entry[42:46])[0]
        entry[20:28] = b"\xff" * 8
        entry[42:46] = b"\xff" * 4
        other = struct.pack("<2H4s", 7, 4, b"    ")
        extra = other + struct.pack("<2H3Q", 1, 24, nbytes, packed, place)
        entry[30:32] = struct.pack("<H", len(extra))
        wide += bytes(entry) + content[at + 46 : at + 46 + name] + extra
        at += 46 + name
    assert at == end and size == end - begin
    tail = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(wide), begin
    )
    tail += struct.pack("<4sLQL", b"PK\x06\x07", 0, begin + len(wide), 1)
    tail += struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    file = tmp_path / "y.bin"
    file.write_bytes(content[:begin] + wide + tail)
    assert whole(TorchFile(file), "w").tolist() == values.reshape(2, 3).tolist()
