"""Files that real torch wrote (tests/fixtures/make_torch.py), read without it."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import struct
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

from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.checkpoints.tensors import DTYPES
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import T5, t5_weights
from ..support.torch_files import (
    Call,
    Name,
    Persistent,
    Raw,
    encode,
    save_torch,
    tensor,
    write_old,
    write_zip,
)

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


class Nested:
    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (Shell(), "x")


@pytest.mark.parametrize(
    ("value", "names"),
    [(Shell(), ".system"), (Evaluation(), "builtin"), (Nested(), "getattr")],
)
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
mlx_specdec.checkpoints.formats.torch_pickle.load
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


def test_types_that_are_not_read_are_named(tmp_path: Path) -> None:
    for name in ("ComplexFloatStorage", "QInt8Storage", "complex64", "float8_e5m2", "qint8"):
        for value in ({"w": Name("torch", name)}, {"w": Call(Name("torch", name), ())}):
            text = refused(write_zip(tmp_path / "x.bin", value, DATA))
            assert f"of the type {name}," in text and "malicious" not in text


ORDERED = encode(Name("collections", "OrderedDict"))
CODES = {
    "operations that no state dict needs": [
        b"ios\nsystem\n",  # INST
        b"(cos\nsystem\no",
        b"(" + ORDERED + b"o",  # OBJ
        ORDERED + b")\x81",  # NEWOBJ
        ORDERED + b")}\x92",  # NEWOBJ_EX
        b"\x82\x01",  # EXT1
        b"\x83\x01\x00",
        b"\x84\x01\x00\x00\x00",
        b"Pstorage\n",  # PERSID
        b"\x97",  # NEXT_BUFFER
        b"\x8f",  # EMPTY_SET
        b"\xff",
        b"\x80\x09",  # protocols
        b"\x80\x01",
    ],
    "values that are too large or not there": [
        b"X\xff\xff\xff\xff",
        b"B\xff\xff\xff\xff",
        b"\x8d" + b"\xff" * 8,
        b"T\xff\xff\xff\xff",  # of -1 bytes
        b"X\x02\x00\x00\x00\xff\xff",  # a text that is none
        b"c\xff\n\xff\n",
        b"c" + b"a" * 500 + b"\nb\n",
        b"h\x07",
        b"j\xff\xff\xff\xff",
        b"R",
        b"\x93",
        b"\x85",
        b"N(N",
        b"NN",
    ],
    "calls of what cannot be called, or so": [
        b"NNR",
        b"})R",
        b"]]R",
        ORDERED + b"]R",
        ORDERED + b"X\x00\x00\x00\x00R",
        encode(Name("torch", "FloatStorage")) + b")R",
        encode(Name("torch", "float32")) + b")R",
        encode(Name("torch", "Tensor")) + b")R",
        encode(Call(Name("torch._utils", "_rebuild_tensor_v3"), (7,))),
        encode(Call(Name("torch._tensor", "_rebuild_from_type_v2"), (7,))),
        encode(Call(Name("torch", "Size"), (7,))),
        encode(Call(Name("torch._utils", "_rebuild_parameter"), (7,))),
        *(
            encode(Call(Name("collections", "OrderedDict"), arguments))
            for arguments in ((7,), ((("a", 1),),), ([("a",)],), ([((1, 2), 1)],), ([], []))
        ),
        *(
            encode(
                Call(Name("torch._tensor", "_rebuild_from_type_v2"), (Name(*name), kind, (), {}))
            )
            for name, kind in (
                (("torch", "Size"), Name("torch", "Tensor")),
                (("torch._utils", "_rebuild_tensor_v2"), Name("torch", "float32")),
            )
        ),
    ],
    "containers that are none, or not marked": [
        b"u",
        b"(",
        b"(NNu",
        b"]NNs",
        b"}(Nu",
        b"NNa",
        b"}Na",
        encode(tensor()) + b"Na",
    ],
    "keys that are no plain values": [
        b"}" + encode((1, 2)) + b"Ns",
        b"}]Ns",
        b"}(" + encode(Name("torch", "Tensor")) + b"Nu",
    ],
    "states of objects": [b"b", b"]}b", b"}]b", encode(tensor()) + b"}b", ORDERED + b"}b"],
    "storages that are none": [
        b"NQ",
        encode(Persistent(("module", None, None, None))),
        encode(Persistent(("storage", None, "0", "cpu", 6))),
        encode(Persistent(("storage", Name("torch", "FloatStorage"), "0", "cpu", 6, (1, 2)))),
    ],
    "no state dicts": [b"}", b"]", encode({"epoch": 3}), encode(tensor(old=True))],
    "names that are none": [encode({name: tensor(old=True)}) for name in ("a\nb", 3, "")],
}


@pytest.mark.parametrize("kind", CODES)
def test_operations_that_make_no_plain_value_are_refused(tmp_path: Path, kind: str) -> None:
    for code in CODES[kind]:
        text = b"\x80\x02" + code + b"."
        refused(write_old(tmp_path / "x.bin", text, {}))
        refused(write_zip(tmp_path / "x.bin", text, DATA))


LIES: dict[str, list[dict[str, Any]]] = {
    "beyond its storage": [
        {"shape": (2, 4), "strides": (4, 1)},
        {"offset": 1},
        {"strides": (2**61, 1)},
    ],
    "tensor wrongly": [
        {"offset": -1},
        {"offset": 2**70},
        {"strides": (3, -1)},
        {"shape": (2.0, 3)},
        {"shape": (True, 3)},
        {"shape": (2,)},
        {"shape": [2, 3]},
        {"shape": (1,) * 40, "strides": (1,) * 40},
        {"shape": (2**40, 0)},
    ],
    "claims more bytes": [{"shape": (2**30, 2**30), "strides": (0, 0)}],
    "truncated or damaged in w": [{"count": 7}, {"count": 2**40}, {"storage": "DoubleStorage"}],
    "storage wrongly": [{"count": -6}, {"count": 6.0}, {"key": 0}],
    "bytes of w are not in it": [{"key": "1"}, {"key": "../version"}],
}


@pytest.mark.parametrize("says", LIES)
def test_a_tensor_that_lies_about_its_storage_is_refused(tmp_path: Path, says: str) -> None:
    for lie in LIES[says]:
        assert says in refused(write_zip(tmp_path / "x.bin", {"w": tensor(**lie)}, DATA))


def test_a_tensor_whose_values_are_not_its_bytes_is_refused(tmp_path: Path) -> None:
    plain = tensor()
    for marks, sound in (({}, True), (None, True), ({"neg": True}, False)):
        marked = Call(plain.name, (*plain.arguments, marks))
        file = write_zip(tmp_path / "x.bin", {"w": marked}, DATA)
        if sound:
            assert TorchFile(file).infos["w"].shape == (2, 3)
        else:
            assert "negated" in refused(file)


def test_archives_that_are_no_state_dicts_are_told_apart(tmp_path: Path) -> None:
    good = {"w": tensor()}
    file = tmp_path / "x.bin"
    assert "TorchScript" in refused(write_zip(file, good, DATA, records={"x/code/a.py": b""}))
    assert "TorchScript" in refused(write_zip(file, good, DATA, records={"y/data.pkl": b""}))
    assert "byte order" in refused(write_zip(file, good, DATA, records={"x/byteorder": b"odd"}))
    assert "compresses" in refused(write_zip(file, good, DATA, method=zipfile.ZIP_DEFLATED))
    with pytest.warns(UserWarning, match="Duplicate"):
        write_zip(file, good, DATA, records={"x/data/0": bytes(24)})
    assert "twice" in refused(file)


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


def doubling(times: int) -> bytes:
    """A list of two references to a list of two references to ..."""
    step = b"](" + b"h\x00h\x00" + b"eq\x00"
    return b"\x80\x02]q\x00" + step * times + b"."


BOMBS = {
    "laughs": doubling(100),
    "nested lists": b"\x80\x02" + b"](" * 200_000 + b"e" * 200_000 + b".",
    "nested tuples": b"\x80\x02N" + b"\x85" * 600_000 + b".",
    "nested tuples as key": b"\x80\x02}N" + b"\x85" * 600_000 + b"Ns.",
    "marks": b"\x80\x02" + b"(" * 600_000 + b".",
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


def directory_of(count: int) -> bytes:
    """An archive whose directory has `count` empty records of one byte's name."""
    local = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 0, 0, 33, 0, 0, 0, 1, 0) + b"x"
    fields = (20, 20, 0, 0, 0, 33, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0)
    entry = struct.pack("<4s6H3L5H2L", b"PK\x01\x02", *fields) + b"x"
    counts = (min(count, 65535),) * 2
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, *counts, 47 * count, len(local), 0)
    return local + entry * count + end


QUICK = ("copies", "long directory")
"""Bombs that are refused at once; the others take seconds to count up to their limit."""


@pytest.mark.parametrize(
    "name",
    [
        name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
        for name in (*BOMBS, "directory", "long directory")
    ],
)
def test_bombs_are_refused_within_the_memory_of_a_small_file(tmp_path: Path, name: str) -> None:
    """In a process of its own, which a bomb may bring down."""
    file = tmp_path / "x.bin"
    if name in BOMBS:
        write_zip(file, BOMBS[name])
    else:
        file.write_bytes(directory_of(178_000 if name == "directory" else 180_000))
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


def patched(file: Path, place: int, form: str, *numbers: int) -> Path:
    """An archive with other numbers in the directory's entry of its last record, x/version."""
    content = bytearray(write_zip(file, {"w": tensor()}, DATA).read_bytes())
    struct.pack_into(form, content, content.rindex(b"PK\x01\x02") + place, *numbers)
    file.write_bytes(content)
    return file


def test_a_record_that_is_not_as_the_directory_says_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    for sizes in ((1, 2), (2, 1)):
        assert "compresses or encrypts 'x/version'" in refused(patched(file, 20, "<2L", *sizes))
    assert "compresses or encrypts 'x/version'" in refused(patched(file, 8, "<H", 1))
    for begin in (1, 41, 2**31):
        assert "truncated or damaged" in refused(patched(file, 42, "<L", begin))
    assert "truncated or damaged" in refused(patched(file, 20, "<2L", 10**6, 10**6))


def test_records_that_lie_on_top_of_each_other_are_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x.bin", {"w": tensor()}, {"0": bytes(24), "1": bytes(24)})
    content = bytearray(file.read_bytes())
    struct.pack_into("<2L", content, content.rindex(b"x/data/1") - 26, 25, 25)
    first = content.index(b"x/data/0", content.index(b"PK\x01\x02"))
    struct.pack_into("<2L", content, first - 26, 25, 25)
    file.write_bytes(content)
    assert "damaged in 'x/data/" in refused(file)


def test_a_directory_larger_than_any_is_refused(tmp_path: Path) -> None:
    content = bytearray(write_zip(tmp_path / "x.bin", {"w": tensor()}, DATA).read_bytes())
    at = content.rfind(b"PK\x05\x06")
    file = tmp_path / "y.bin"
    for size, place in ((2**40, 2**45), (2**62, 0), (at, 0)):
        wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2**40, 2**40, size, place)
        locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
        end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
        file.write_bytes(bytes(content[:at]) + wide + locator + end)
        assert "truncated or damaged" in refused(file)


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


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02"]), st.binary(max_size=2000))
def test_random_bytes_are_refused(scratch: Path, head: bytes, tail: bytes) -> None:
    assert only_checkpoint_errors(scratch, head + tail)


OPERATIONS = bytes(sorted(map(ord, "(012NJKMGXTUBC]lae}dsu)tqrhjcRbQ."))) + bytes(
    [0x80, 0x95, 0x88, 0x89, 0x8A, 0x8C, 0x8D, 0x8E, 0x85, 0x86, 0x87, 0x93, 0x94]
)
FRAGMENTS = [
    encode(Name("collections", "OrderedDict")),
    encode(Name("torch", "FloatStorage")),
    encode(Name("torch._utils", "_rebuild_tensor_v2")),
    encode(Name("torch._tensor", "_rebuild_from_type_v2")),
    encode(tensor()),
    encode({"w": tensor()}),
    encode("w"),
    encode(7),
]


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(
    st.lists(
        st.sampled_from(FRAGMENTS)
        | st.sampled_from(OPERATIONS).map(lambda code: bytes([code]))
        | st.binary(max_size=5),
        max_size=40,
    )
)
def test_any_sequence_of_operations_is_refused_or_read(scratch: Path, parts: list[bytes]) -> None:
    write_zip(scratch, b"\x80\x02" + b"".join(parts) + b".", DATA)
    only_checkpoint_errors(scratch, scratch.read_bytes())


@pytest.mark.slow
def test_many_mutations_of_real_files_are_refused_or_read(scratch: Path) -> None:
    draw = random.Random(20)
    kinds = [0, 0]
    for _ in range(2000):
        content = bytearray(draw.choice(SEEDS))
        for _ in range(draw.randint(1, 4)):
            place, size = draw.randrange(len(content)), draw.randint(1, 16)
            part = draw.choice([draw.randbytes(size), b"", b"\xff" * size, bytes(size)])
            content[place : place + draw.choice([0, size])] = part
        kinds[only_checkpoint_errors(scratch, bytes(content))] += 1
    assert min(kinds) > 100
