"""Files that real torch wrote (benchmarks/make_torch.py), read without it."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_specdec.checkpoints.formats.torch import TorchFile
from mlx_specdec.checkpoints.tensors import DTYPES
from mlx_specdec.errors import CheckpointError

from ..support.torch_files import Call, Name, Persistent, encode, tensor, write_old, write_zip

FIXTURES = Path(__file__).parents[1] / "fixtures" / "torch"
EVERY = ["every.zip.bin", "every.old.bin", "every.zip3.bin", "every.zip4.bin", "every.zip5.bin"]
FLOATS = {"float64": "F32", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
STORED = {**FLOATS, "float8_e4m3fn": "F8_E4M3", "bool": "BOOL"}
for size in (8, 16, 32, 64):
    STORED |= {f"int{size}": f"I{size}", f"uint{size}": f"U{size}"}


def expected(name: str) -> mx.array:
    values = np.load(FIXTURES / "every.npz")[name]
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return mx.array(values).view(mx.bfloat16) if name == "bfloat16" else mx.array(values)


def whole(file: TorchFile, name: str) -> mx.array:
    return file.read(name)


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


def test_nothing_of_a_storage_is_read_for_the_list_of_tensors(tmp_path: Path) -> None:
    size = 1 << 30
    value = {"big": tensor(count=size, shape=(size,), strides=(1,), old=True)}
    file = write_old(tmp_path / "big.bin", value, {"0": (size, b"")})
    os.truncate(file, file.stat().st_size + 4 * size)
    found = TorchFile(file)
    assert found.infos["big"].nbytes == 4 * size


# Hostile and damaged torch archives: refused by name, in one line, before anything runs.


DATA = {"0": bytes(24)}


def refused(file: Path) -> str:
    """Return the message that refuses a file, without the file's name."""
    with pytest.raises(CheckpointError) as caught:
        found = TorchFile(file)
        for name in found.infos:
            found.read(name)
    text = str(caught.value)
    assert "\n" not in text and text.startswith(str(file)) and len(text) < len(str(file)) + 300
    return text[len(str(file)) :]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
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
    assert says in refused(file)


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
posix.system subprocess.Popen runpy.run_path functools.partial builtins.eval builtins.getattr
torch.load torch.utils.cpp_extension.load_inline torch._utils.__builtins__
numpy.load collections.OrderedDict.__class__ mlx_specdec.checkpoints.formats.torch.load
"""


def test_every_other_name_is_refused_with_the_name(tmp_path: Path) -> None:
    for name in FORBIDDEN.split():
        module, _, last = name.rpartition(".")
        for value in (
            {"w": Call(Name(module, last), ("echo",))},
            {"w": tensor(), "deep": [({"a": (Name(module, last),)},)]},
        ):
            assert f"it asks for {name}," in refused(write_zip(tmp_path / "x.bin", value, DATA))


CODES = {
    "another protocol": b"\x80\x09",
    "a text longer than the file": b"X\xff\xff\xff\xff",
    "a call of nothing": b"NNR",
    "a call with too little": encode(Call(Name("torch._utils", "_rebuild_tensor_v3"), (7,))),
    "no storage": encode(Persistent(("module", None, None, None))),
    "no state dict": encode({"epoch": 3}),
    "a name that is none": encode({"a\nb": tensor(old=True)}),
}


@pytest.mark.parametrize("kind", CODES)
def test_a_damaged_pickle_is_refused(tmp_path: Path, kind: str) -> None:
    text = b"\x80\x02" + CODES[kind] + b"."
    refused(write_old(tmp_path / "x.bin", text, {}))
    refused(write_zip(tmp_path / "x.bin", text, DATA))


def test_the_state_of_an_object_changes_nothing(tmp_path: Path) -> None:
    kind = encode(Name("torch", "float32")) + encode({"numpy": "O8"}) + b"b0"
    file = write_zip(tmp_path / "x.bin", b"\x80\x02" + kind + encode({"w": tensor()}) + b".", DATA)
    assert mx.array_equal(whole(TorchFile(file), "w"), mx.zeros((2, 3))).item()


LIES: dict[str, list[dict[str, Any]]] = {
    "beyond its storage": [{"shape": (2, 4), "strides": (4, 1)}, {"offset": -1}],
    "truncated or damaged in w": [{"count": 7}, {"storage": "DoubleStorage"}],
    "what is no storage": [{"count": -6}],
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


def test_other_archives_are_distinguished(tmp_path: Path) -> None:
    good, file = {"w": tensor()}, tmp_path / "x.bin"
    assert "TorchScript" in refused(write_zip(file, good, DATA, records={"x/code/a.py": b""}))
    assert "big-endian" in refused(write_zip(file, good, DATA, records={"x/byteorder": b"big"}))
    assert "compresses" in refused(write_zip(file, good, DATA, method=zipfile.ZIP_DEFLATED))


SEEDS = [
    (FIXTURES / name).read_bytes()
    for name in ("every.zip.bin", "every.zip4.bin", "every.old.bin", "nested.bin")
]


@settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from(SEEDS), st.floats(0, 1, exclude_max=True))
def test_a_cut_file_is_always_refused(tmp_path: Path, content: bytes, share: float) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(content[: int(share * len(content))])
    refused(file)
