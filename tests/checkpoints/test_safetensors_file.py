from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats.safetensors import SafetensorsFile, load, read_header
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import raw_file, save

ARRAYS = {
    "a": mx.arange(6, dtype=mx.float32).reshape(2, 3),
    "b": mx.array([1.5, -2.0], dtype=mx.bfloat16),
    "scalar": mx.array(3, dtype=mx.int32),
    "empty": mx.zeros((0, 4), dtype=mx.float16),
}


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_header_gives_types_shapes_and_sizes_as_the_arrays_have_them(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, {name: array for name, array in ARRAYS.items() if array.size})
    infos = read_header(file)
    loaded = load(file)
    assert {name: (info.shape, info.nbytes) for name, info in infos.items()} == {
        name: (array.shape, array.nbytes) for name, array in loaded.items()
    }
    assert infos["b"].dtype == "BF16"


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="resident maps are not told")
def test_pages_that_were_read_are_let_go(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save(file, {"a": mx.arange(1 << 22, dtype=mx.float32).reshape(1 << 12, 1 << 10)})
    tensor = SafetensorsFile(file).tensor("a")
    total = sum(mx.sum(rows[:, 0]).item() for _, rows in tensor.pieces(1 << 20))
    assert total == sum(range(0, 1 << 22, 1 << 10))
    lines = Path("/proc/self/smaps").read_text().split(str(file))[1].splitlines()
    resident = next(line for line in lines if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 < file.stat().st_size / 4
    assert tensor.rows(4095, 4096)[0, -1].item() == (1 << 22) - 1


def test_an_empty_tensor_is_read(tmp_path: Path) -> None:
    file = raw_file(tmp_path / "x.safetensors", {"e": entry("F32", [0, 3], 0, 0)})
    assert read_header(file)["e"].shape == (0, 3)


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry("F32", [2], 0, 8)}, b"1234567", "truncated in a"),
        ({"a": entry("F32", [2], 0, 8)}, b"123456789", "1 bytes belong to no tensor"),
        ({"a": entry("F32", [3], 0, 8)}, b"12345678", "needs 12"),
        ({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12), "b does not"),
        ({"a": entry("F32", [1], 0, 8)}, bytes(8), "needs 4"),
        ({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12), "b does not"),
        ({"a": entry("F32", [1], 4, 8)}, bytes(8), "a does not follow"),
        ({"a": entry("F32", [-2], 0, 8)}, bytes(8), "damaged header at a"),
        ({"a": entry("F32", [2.0], 0, 8)}, bytes(8), "damaged header at a"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "damaged header at a"),
        ({"a": entry("F32", ["2"], 0, 8)}, bytes(8), "damaged header at a"),
        ({"a": entry("F32", [2], -8, 0)}, bytes(8), "damaged header at a"),
        ({"a": entry("F32", [10**30], 0, 4 * 10**30)}, bytes(8), "claims the shape"),
        ({"a": entry("F32", [2**32, 0], 0, 0)}, b"", "claims the shape"),
        ({"a": entry("F64", [1], 0, 8)}, bytes(8), "F64"),
        ({"a": entry("?", [1], 0, 8)}, bytes(8), "MLX does not read"),
        ({"a": {"dtype": "F32", "shape": [1]}}, bytes(4), "damaged header at a"),
        ({"a": [1, 2]}, bytes(4), "damaged header at a"),
        ({"a": None}, b"", "damaged header at a"),
        ([], b"", "damaged header"),
        (b"not json", b"", "damaged header"),
        (b"\xff\xfe", b"", "damaged header"),
        (b"[" * 100_000, b"", "damaged header"),
        (b'{"a":1,"a":2}', b"", "repeats 'a'"),
        ({"a\nb": entry("F32", [2], 0, 8)}, bytes(8), "a tensor is called"),
        ({"\ud800": entry("F32", [2], 0, 8)}, bytes(8), "a tensor is called"),
        ({"": entry("F32", [2], 0, 8)}, bytes(8), "a tensor is called"),
        ({"a" * 2000: entry("F32", [2], 0, 8)}, bytes(8), "a tensor is called"),
    ],
)
def test_a_damaged_header_is_refused_in_one_line_with_the_files_name(
    tmp_path: Path, header: Any, data: bytes, says: str
) -> None:
    file = raw_file(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError) as caught:
        read_header(file)
    assert says in str(caught.value) and "x.safetensors" in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("length", [3, 10**6, 10**12, 2**63, 2**64 - 1])
def test_a_header_length_larger_than_the_file_is_refused(tmp_path: Path, length: int) -> None:
    file = raw_file(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(CheckpointError):
        read_header(file)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    save(whole, {name: array for name, array in ARRAYS.items() if array.size})
    content = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for size in range(len(content)):
        cut.write_bytes(content[:size])
        with pytest.raises(CheckpointError):
            read_header(cut)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.recursive(
            st.none() | st.integers() | st.floats() | st.text(max_size=4) | st.just("F32"),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["dtype", "shape", "data_offsets"]), inner, max_size=3
                )
            ),
            max_leaves=8,
        ),
        max_size=3,
    ),
    st.binary(max_size=16),
)
def test_any_header_either_fits_the_file_or_is_a_checkpoint_error(
    tmp_path_factory: pytest.TempPathFactory, header: Any, data: bytes
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.safetensors"
    raw_file(file, json.dumps(header).encode(), data)
    try:
        infos = read_header(file)
    except CheckpointError as problem:
        assert "\n" not in str(problem).replace(str(file), "")
    else:
        assert sum(info.nbytes for info in infos.values()) == len(data)
        assert {name: array.shape for name, array in load(file).items()} == {
            name: info.shape for name, info in infos.items()
        }
