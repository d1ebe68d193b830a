"""Files that real torch wrote (tests/fixtures/make_torch.py), read without it."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats import torch
from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.checkpoints.tensors import DTYPES
from mlx_specdec.errors import CheckpointError

from ..support.torch_files import Call, Name, Persistent, Raw, encode, tensor, write_old, write_zip

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
        (b"\x80\x02}q\x00.", "none that torch.save wrote"),
        (b"PK\x03\x04", "truncated"),
    ],
)
def test_what_is_no_archive_is_reported_in_one_line(
    tmp_path: Path, content: bytes, says: str
) -> None:
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        TorchFile(file)
    assert says in str(caught.value) and str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


# Hostile and damaged torch archives: refused by name, in one line, before anything runs.


DATA = {"0": bytes(24)}


def refused(file: Path) -> str:
    """The sentence, without the file's name."""
    with pytest.raises(CheckpointError) as caught:
        found = TorchFile(file)
        for name, info in found.infos.items():
            found.rows(name, 0, info.extent)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(file)) and len(text) < len(str(file)) + 300
    return text[len(str(file)) :]


class Shell:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch ran",)


class Evaluation:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("open('ran', 'w')",)


@pytest.mark.parametrize(("value", "names"), [(Shell(), ".system"), (Evaluation(), "builtin")])
def test_real_exploits_are_refused_by_name_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, names: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 3, 4, 5):
        text = pickle.dumps({"weight": value}, protocol=protocol)
        assert names in refused(write_zip(tmp_path / "zip.bin", text))
        assert names in refused(write_old(tmp_path / "old.bin", text, {}))
    assert not (tmp_path / "ran").exists()


FORBIDDEN = """
os.system posix.system subprocess.Popen runpy.run_path functools.partial argparse.Namespace
builtins.eval builtins.exec builtins.getattr builtins.__import__ __builtin__.eval
torch.load torch.hub.load torch.jit.load torch.serialization.load
torch.utils.cpp_extension.load_inline torch.nn.modules.linear.Linear
torch._utils._rebuild_qtensor torch._utils._rebuild_sparse_tensor torch._utils.__builtins__
numpy.core.multiarray._reconstruct numpy.load collections.OrderedDict.__class__ collections.deque
mlx_specdec.checkpoints.formats.torch.load
"""


def test_every_other_name_is_refused_with_the_name(tmp_path: Path) -> None:
    for name in FORBIDDEN.split():
        module, _, last = name.rpartition(".")
        for value in (
            {"w": Call(Name(module, last), ("echo",))},
            {"w": Name(module, last)},
            {"w": tensor(), "deep": [({"a": (Name(module, last),)},)]},
            Raw(encode(module) + encode(last) + b"\x93"),
        ):
            assert f"it asks for {name}," in refused(write_zip(tmp_path / "x.bin", value, DATA))


ORDERED = encode(Name("collections", "OrderedDict"))
CODES = {
    "an operation that no state dict needs": b"(" + ORDERED + b"o",
    "another protocol": b"\x80\x09",
    "a text longer than the file": b"X\xff\xff\xff\xff",
    "a text that is none": b"X\x02\x00\x00\x00\xff\xff",
    "a value that was not stored": b"j\xff\xff\xff\xff",
    "two values": b"NN",
    "a call of nothing": b"NNR",
    "a call of a type": encode(Name("torch", "float32")) + b")R",
    "a call with too little": encode(Call(Name("torch._utils", "_rebuild_tensor_v3"), (7,))),
    "pairs that are none": encode(Call(Name("collections", "OrderedDict"), ([("a",)],))),
    "no list to append to": b"}Na",
    "a key that is no plain value": b"}" + encode((1, 2)) + b"Ns",
    "the state of an object": encode(tensor()) + b"}b",
    "no storage": encode(Persistent(("module", None, None, None))),
    "no state dict": encode({"epoch": 3}),
    "a name that is none": encode({"a\nb": tensor(old=True)}),
}


@pytest.mark.parametrize("kind", CODES)
def test_operations_that_make_no_plain_value_are_refused(tmp_path: Path, kind: str) -> None:
    text = b"\x80\x02" + CODES[kind] + b"."
    refused(write_old(tmp_path / "x.bin", text, {}))
    refused(write_zip(tmp_path / "x.bin", text, DATA))


LIES: dict[str, list[dict[str, Any]]] = {
    "beyond its storage": [{"shape": (2, 4), "strides": (4, 1)}, {"strides": (2**61, 1)}],
    "tensor wrongly": [{"offset": -1}, {"shape": (2.0, 3)}, {"shape": (2**40, 0)}],
    "claims more bytes": [{"shape": (2**30, 2**30), "strides": (0, 0)}],
    "truncated or damaged in w": [{"count": 7}, {"storage": "DoubleStorage"}],
    "storage wrongly": [{"count": -6}],
    "bytes of w are not in it": [{"key": "../version"}],
}


@pytest.mark.parametrize("says", LIES)
def test_a_tensor_that_lies_about_its_storage_is_refused(tmp_path: Path, says: str) -> None:
    for lie in LIES[says]:
        assert says in refused(write_zip(tmp_path / "x.bin", {"w": tensor(**lie)}, DATA))


def test_the_older_streams_list_of_storages_has_to_fit(tmp_path: Path) -> None:
    file, good = tmp_path / "x.bin", {"w": tensor(old=True)}
    TorchFile(write_old(file, good, {"0": (6, bytes(24))}))
    for storages in (
        {"1": (6, bytes(24))},
        {"0": (7, bytes(28))},
        {"0": (6, bytes(23))},
        {"0": (-1, bytes(24))},
        {},
    ):
        refused(write_old(file, good, storages))
    larger = {"w": tensor(old=True, storage="DoubleStorage"), "v": tensor(old=True)}
    refused(write_old(file, larger, {"0": (6, bytes(24))}))


BOMBS = {
    "nested tuples as key": b"\x80\x02}N" + b"\x85" * 600_000 + b"Ns.",
    "operations": b"\x80\x02" + b"N0" * 3_000_000 + b".",
    "far memo": b"\x80\x02Nr\xff\xff\xff\xff.",
    "copies": (
        b"\x80\x02]q\x00("
        + encode(("k", "v")) * 10_000
        + b"e0"
        + (encode(Name("collections", "OrderedDict")) + b"h\x00\x85R") * 20_000
        + b"."
    ),
    "itself": b"\x80\x02}q\x00X\x05\x00\x00\x00modelh\x00s.",
}


@pytest.mark.parametrize(
    "name",
    [name if name == "copies" else pytest.param(name, marks=pytest.mark.slow) for name in BOMBS],
)
def test_bombs_are_refused_within_the_memory_of_a_small_file(tmp_path: Path, name: str) -> None:
    """In a process of its own, which a bomb may bring down."""
    file = write_zip(tmp_path / "x.bin", BOMBS[name])
    script = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mlx_specdec.checkpoints.formats.torch import TorchFile\n"
        "from mlx_specdec.errors import CheckpointError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "before = peak()\n"
        "try:\n    TorchFile(Path(sys.argv[1]))\n"
        "except CheckpointError as problem:\n    print(problem)\n"
        "unit = 1 if sys.platform == 'darwin' else 1024\n"
        "assert (peak() - before) * unit < 300_000_000\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith(str(file)), done.stderr
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_pickle_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "LONGEST_PICKLE", 50)
    assert "its pickle has over 50 bytes" in refused(write_zip(tmp_path / "x.bin", {"w": tensor()}))


def test_other_archives_are_distinguished(tmp_path: Path) -> None:
    good, file = {"w": tensor()}, tmp_path / "x.bin"
    assert "TorchScript" in refused(write_zip(file, good, DATA, records={"x/code/a.py": b""}))
    assert "byte order" in refused(write_zip(file, good, DATA, records={"x/byteorder": b"odd"}))
    assert "compresses" in refused(write_zip(file, good, DATA, method=zipfile.ZIP_DEFLATED))


SEEDS = [
    (FIXTURES / name).read_bytes()
    for name in ("every.zip.bin", "every.zip4.bin", "every.old.bin", "big.bin", "nested.bin")
]


def only_checkpoint_errors(file: Path, content: bytes) -> bool:
    """Whether the content was refused; anything but that or arrays that fit it is a failure."""
    file.write_bytes(content)
    try:
        found = TorchFile(file)
        for name, info in found.infos.items():
            assert found.rows(name, 0, info.extent).shape == info.shape
            assert info.nbytes <= len(content)
    except CheckpointError as problem:
        assert "\n" not in str(problem).replace(str(file), "")
        return True
    return False


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.bin"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of pickletools, for a backslash
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bits_are_refused_or_read(scratch: Path, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(SEEDS)))
    for place in data.draw(st.lists(st.integers(0, len(content) * 8 - 1), min_size=1, max_size=8)):
        content[place // 8] ^= 1 << place % 8
    only_checkpoint_errors(scratch, bytes(content))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(SEEDS), st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_always_refused(scratch: Path, content: bytes, share: float) -> None:
    assert only_checkpoint_errors(scratch, content[: int(share * len(content))])
