"""Hostile and damaged torch archives: refused by name, in one line, before anything runs."""

from __future__ import annotations

import os
import pickle
import random
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats.torch.file import TorchFile
from mlx_specdec.checkpoints.formats.torch.objects import ADMITTED
from mlx_specdec.errors import CheckpointError

from .torch_makers import Call, Name, Persistent, Raw, encode, tensor, write_old, write_zip

FIXTURES = Path(__file__).parents[1] / "fixtures" / "torch"
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


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "names"),
    [(Shell(), ".system"), (Evaluation(), "builtin"), (Nested(), "getattr")],
)
def test_real_exploits_are_refused_by_name_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any, names: str, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    text = pickle.dumps({"weight": value}, protocol=protocol)
    assert names in refused(write_zip(tmp_path / "zip.bin", text))
    assert names in refused(write_old(tmp_path / "old.bin", text, {}))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "subprocess.Popen",
        "builtins.eval",
        "builtins.exec",
        "builtins.getattr",
        "builtins.__import__",
        "__builtin__.eval",
        "torch.load",
        "torch.hub.load",
        "torch.jit.load",
        "torch.serialization.load",
        "torch.utils.cpp_extension.load_inline",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils.__builtins__",
        "torch.nn.modules.linear.Linear",
        "numpy.core.multiarray._reconstruct",
        "numpy.load",
        "collections.OrderedDict.__class__",
        "collections.deque",
        "functools.partial",
        "mlx_specdec.checkpoints.formats.torch.unpickle.load",
        "runpy.run_path",
        "argparse.Namespace",
    ],
)
def test_every_other_name_is_refused_with_the_name(tmp_path: Path, name: str) -> None:
    module, _, last = name.rpartition(".")
    for value in (
        {"w": Call(Name(module, last), ("echo",))},
        {"w": Name(module, last)},
        {"w": tensor(), "deep": [({"a": (Name(module, last),)},)]},
        Raw(encode(module) + encode(last) + b"\x93"),
    ):
        assert f"it asks for {name}," in refused(write_zip(tmp_path / "x.bin", value, DATA))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ComplexFloatStorage", "complex64"),
        ("ComplexDoubleStorage", "complex128"),
        ("QInt8Storage", "qint8"),
        ("complex64", "complex64"),
        ("float8_e5m2", "float8_e5m2"),
        ("float8_e4m3fnuz", "float8_e4m3fnuz"),
    ],
)
def test_types_that_are_not_read_are_named(tmp_path: Path, name: str, kind: str) -> None:
    for value in ({"w": Name("torch", name)}, {"w": Call(Name("torch", name), ())}):
        text = refused(write_zip(tmp_path / "x.bin", value, DATA))
        assert f"of the type {kind}," in text and "malicious" not in text


def test_a_name_is_admitted_as_a_whole_only() -> None:
    assert ("torch", "load") not in ADMITTED and len(ADMITTED) < 50
    assert not any(name in "load eval exec compile open" for _, name in ADMITTED)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize(
    ("code", "says"),
    [
        (b"ios\nsystem\n", "operation INST"),
        (b"(cos\nsystem\no", "os.system"),
        (b"(" + encode(Name("collections", "OrderedDict")) + b"o", "operation OBJ"),
        (encode(Name("collections", "OrderedDict")) + b")\x81", "operation NEWOBJ"),
        (encode(Name("collections", "OrderedDict")) + b")}\x92", "operation NEWOBJ_EX"),
        (b"\x82\x01", "operation EXT1"),
        (b"\x83\x01\x00", "operation EXT2"),
        (b"\x84\x01\x00\x00\x00", "operation EXT4"),
        (b"Pstorage\n", "operation PERSID"),
        (b"\x97", "operation NEXT_BUFFER"),
        (b"\x8f", "operation EMPTY_SET"),
        (b"\xff", "operation 0xff"),
        (b"\x80\x09", "protocol 9"),
        (b"X\xff\xff\xff\xff", "text of 4,294,967,295 bytes"),
        (b"\x8d" + b"\xff" * 8, "text of"),
        (b"T\xff\xff\xff\xff", "text of -1 bytes"),
        (b"\x8a\xff" + bytes(255), "number of 255 bytes"),
        (b"X\x02\x00\x00\x00\xff\xff", "text that is none"),
        (b"h\x07", "refers to a value"),
        (b"j\xff\xff\xff\xff", "refers to a value"),
        (b"R", "not there"),
        (b"NNR", "cannot be called"),
        (b"})R", "cannot be called"),
        (encode(Name("torch", "FloatStorage")) + b")R", "cannot be called"),
        (b"u", "lacks a mark"),
        (b"(NNu", "no dict"),
        (b"}(Nu", "key without a value"),
        (b"}" + encode((1, 2)) + b"Ns", "no plain value"),
        (b"}]Ns", "no plain value"),
        (b"NNa", "no list"),
        (b"]}b", "no dict"),
        (b"}]b", "sets the state"),
        (b"(", "middle of a value"),
        (b"NN", "middle of a value"),
        (b"NQ", "no storage"),
        (encode(Persistent(("module", None, None, None))), "no storage"),
        (encode(Persistent(("storage", None, "0", "cpu", 6))), "storage wrongly"),
        (encode(Call(Name("torch", "Size"), (7,))), "size wrongly"),
        (encode(Call(Name("collections", "OrderedDict"), (7,))), "dictionary wrongly"),
        (encode(Call(Name("torch._utils", "_rebuild_parameter"), (7,))), "parameter wrongly"),
        (encode(Call(Name("torch._utils", "_rebuild_tensor_v3"), (7,))), "tensor wrongly"),
        (encode(Call(Name("torch._tensor", "_rebuild_from_type_v2"), (7,))), "tensor wrongly"),
        (b"c" + b"a" * 500 + b"\nb\n", "truncated or damaged"),
        (b"c\xff\n\xff\n", "text that is none"),
        (b"}", "holds no state dict"),
        (b"]", "holds no state dict"),
        (encode({"epoch": 3}), "holds no state dict"),
        (encode(tensor(old=True)), "holds no state dict"),
        (encode({"a\nb": tensor(old=True)}), "a tensor is called"),
        (encode({3: tensor(old=True)}), "a tensor is called"),
        (encode({"": tensor(old=True)}), "a tensor is called"),
    ],
)
def test_operations_that_make_no_plain_value_are_refused(
    tmp_path: Path, code: bytes, says: str, old: bool
) -> None:
    text = b"\x80\x02" + code + b"."
    if old:
        file = write_old(tmp_path / "x.bin", text, {})
    else:
        file = write_zip(tmp_path / "x.bin", text, DATA)
    assert says in refused(file)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"shape": (2, 4), "strides": (4, 1)}, "beyond its storage"),
        ({"offset": 1}, "beyond its storage"),
        ({"offset": -1}, "tensor wrongly"),
        ({"offset": 2**70}, "tensor wrongly"),
        ({"strides": (3, -1)}, "tensor wrongly"),
        ({"strides": (2**61, 1)}, "beyond its storage"),
        ({"shape": (2.0, 3)}, "tensor wrongly"),
        ({"shape": (True, 3)}, "tensor wrongly"),
        ({"shape": (2,)}, "tensor wrongly"),
        ({"shape": [2, 3]}, "tensor wrongly"),
        ({"shape": (1,) * 40, "strides": (1,) * 40}, "tensor wrongly"),
        ({"shape": (2**40, 0)}, "tensor wrongly"),
        ({"shape": (2**30, 2**30), "strides": (0, 0)}, "claims more bytes"),
        ({"count": 7}, "truncated or damaged in w"),
        ({"count": 2**40}, "truncated or damaged in w"),
        ({"count": -6}, "storage wrongly"),
        ({"count": 6.0}, "storage wrongly"),
        ({"key": "1"}, "bytes of w are not in it"),
        ({"key": "../version"}, "bytes of w are not in it"),
        ({"key": 0}, "storage wrongly"),
        ({"storage": "DoubleStorage"}, "truncated or damaged in w"),
    ],
)
def test_a_tensor_that_lies_about_its_storage_is_refused(
    tmp_path: Path, wrong: dict[str, Any], says: str
) -> None:
    assert says in refused(write_zip(tmp_path / "x.bin", {"w": tensor(**wrong)}, DATA))


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
    assert "packs" in refused(write_zip(file, good, DATA, method=zipfile.ZIP_DEFLATED))
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
    two = {"w": tensor(old=True), "v": tensor(old=True, storage="IntStorage")}
    assert "two ways" in refused(write_old(file, two, {"0": (6, bytes(24))}))


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


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_bombs_are_refused_within_the_memory_of_a_small_file(tmp_path: Path, name: str) -> None:
    """In a process of its own, which a bomb may bring down."""
    file = write_zip(tmp_path / "x.bin", BOMBS[name])
    script = (
        "import sys, tracemalloc\n"
        "from pathlib import Path\n"
        "from mlx_specdec.checkpoints.formats.torch.file import TorchFile\n"
        "from mlx_specdec.errors import CheckpointError\n"
        "tracemalloc.start()\n"
        "try:\n    TorchFile(Path(sys.argv[1]))\n"
        "except CheckpointError as problem:\n    print(problem)\n"
        "assert tracemalloc.get_traced_memory()[1] < 300_000_000\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and done.stdout.startswith(str(file)), done.stderr
    assert done.stdout.count("\n") == 1 and done.stderr == ""


def test_a_record_that_reaches_into_the_directory_is_refused(tmp_path: Path) -> None:
    file = write_zip(tmp_path / "x.bin", {"w": tensor()}, DATA)
    content = bytearray(file.read_bytes())
    last = content.rindex(b"PK\x01\x02")
    struct.pack_into("<2L", content, last + 20, 40, 40)  # it has two bytes
    file.write_bytes(content)
    assert "truncated or damaged in 'x/version'" in refused(file)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1)])
def test_a_record_of_two_sizes_is_refused(tmp_path: Path, sizes: tuple[int, int]) -> None:
    file = write_zip(tmp_path / "x.bin", {"w": tensor()}, DATA)
    content = bytearray(file.read_bytes())
    struct.pack_into("<2L", content, content.rindex(b"PK\x01\x02") + 20, *sizes)
    file.write_bytes(content)
    assert "packs or encrypts 'x/version'" in refused(file)


@pytest.mark.parametrize("count", [0, 5, 7, 2**40])
def test_a_stream_that_counts_otherwise_than_its_tensors_is_refused(
    tmp_path: Path, count: int
) -> None:
    file = write_old(tmp_path / "x.bin", {"w": tensor(old=True)}, {"0": (count, bytes(24))})
    assert "truncated or damaged" in refused(file)


def test_a_directory_of_too_many_records_is_refused(tmp_path: Path) -> None:
    content = bytearray(write_zip(tmp_path / "x.bin", {"w": tensor()}, DATA).read_bytes())
    at = content.rfind(b"PK\x05\x06")
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2**40, 2**40, 2**45, 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    file = tmp_path / "y.bin"
    file.write_bytes(bytes(content[:at]) + wide + locator + end)
    assert "claims 1,099,511,627,776 records" in refused(file)


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
    for _ in range(4000):
        content = bytearray(draw.choice(SEEDS))
        for _ in range(draw.randint(1, 4)):
            place, size = draw.randrange(len(content)), draw.randint(1, 16)
            part = draw.choice([draw.randbytes(size), b"", b"\xff" * size, bytes(size)])
            content[place : place + draw.choice([0, size])] = part
        kinds[only_checkpoint_errors(scratch, bytes(content))] += 1
    assert min(kinds) > 100
