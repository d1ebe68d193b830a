"""Choice and reading of files, names of models, and sizes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_specdec.checkpoints import disk as sizes
from mlx_specdec.checkpoints import files, shards
from mlx_specdec.checkpoints.formats.safetensors import SafetensorsFile, read_header
from mlx_specdec.checkpoints.hub import choose
from mlx_specdec.checkpoints.shards import format_of
from mlx_specdec.checkpoints.source import as_directory, names_of, resolve
from mlx_specdec.engine import loading
from mlx_specdec.errors import CheckpointError, SourceError

from ..support.checkpoints import raw_file, refusal, save, write_index, write_sharded_t5, write_t5
from ..support.gguf_files import halves, llama

INDEX = "model.safetensors.index.json"


def sentence(directory: Path, what: Any = files.Weights) -> str:
    return refusal(CheckpointError, what, directory)


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


@pytest.mark.parametrize("with_index", [True, False])
def test_weights_may_be_links_to_another_place(tmp_path: Path, with_index: bool) -> None:
    directory = write_sharded_t5(tmp_path / "many")
    expected = {name: np.array(array) for name, array in files.tensors(directory)}
    for shard in directory.glob("*.safetensors"):
        shard.rename(tmp_path / f"drive-{shard.name}")
        shard.symlink_to(tmp_path / f"drive-{shard.name}")
    if not with_index:
        (directory / INDEX).unlink()
    found = dict(files.tensors(directory))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(np.array(found[name]), expected[name]) for name in expected)


def test_parts_of_a_gguf_model_may_be_links_to_another_place(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    directory.mkdir()
    for number, part in enumerate(halves(llama()), 1):
        name = f"m-{number:05d}-of-00002.gguf"
        (directory / name).symlink_to(part.write(tmp_path / f"drive-{name}"))
    with as_directory(directory) as made:
        assert "model.norm.weight" in files.Weights(made).infos


def test_a_tokenizer_file_may_be_a_link_to_one_of_its_name(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "t5")
    (tmp_path / "vocab.txt").write_text("a")
    (directory / "vocab.txt").symlink_to("../vocab.txt")
    assert directory / "vocab.txt" in files.tokenizer_files(directory)


def test_a_tokenizer_file_that_leads_to_the_users_own_files_is_not_carried(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "t5")
    (tmp_path / "secret").write_bytes(b"key")
    (directory / "vocab.txt").symlink_to("../secret")
    assert "vocab.txt is a link out of its directory" in sentence(directory, files.tokenizer_files)


@pytest.mark.parametrize(
    ("names", "format", "wanted"),
    [
        ("pytorch_model.bin model.fp16.safetensors", "torch", "pytorch_model.bin"),
        ("pytorch_model.bin model.safetensors a.gguf", "safetensors", "model.safetensors"),
    ],
)
def test_what_is_fetched_is_what_is_read(
    names: str, format: str, wanted: str, tmp_path: Path
) -> None:
    for name in names.split():
        (tmp_path / name).write_bytes(b"")
    here = shards.find(tmp_path)
    assert (here.format, [file.name for file in here.files]) == (format, [wanted])
    assert choose("some/model", names.split())[2] == [wanted]
    assert format_of(tmp_path) == format


def test_a_control_groups_limit_counts_where_it_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(sizes, "CONTROL_GROUPS", (tmp_path / "absent", tmp_path / "limit"))
    total = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max\n", total), ("12345678\n", 12345678), (str(1 << 62), total)):
        (tmp_path / "limit").write_text(text)
        assert sizes.memory() == expected


@pytest.mark.parametrize(
    ("info", "on_cpu", "expected"),
    [
        ({"max_recommended_working_set_size": 700, "memory_size": 1000}, False, 700),
        ({"total_memory": 1000}, False, 900),
        ({}, True, 1800),
        # A Mac whose default device is the CPU, and a machine with CUDA.
        ({"max_recommended_working_set_size": 700, "memory_size": 1000}, True, 700),
        ({"total_memory": 1000}, True, 1800),
    ],
)
def test_the_limit_is_the_devices_own_or_a_share_of_memory(
    info: dict[str, int], on_cpu: bool, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = mx.Device(mx.cpu if on_cpu else mx.gpu)
    monkeypatch.setattr(mx, "device_info", gpu_alone(info))
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr(sizes, "memory", lambda: 2000)
    assert sizes.usable_memory() == expected


def gpu_alone(info: dict[str, int]) -> Callable[..., dict[str, int]]:
    """Return a `device_info` that knows the GPU, while the default device may be the CPU."""
    return lambda device=None: info if device == mx.gpu else {}


def test_the_memory_of_a_mac_is_known_on_its_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", gpu_alone({"memory_size": 1000}))
    assert sizes.memory() == 1000


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs smaps")
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


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        ({"a": entry("F32", [2], 0, 8)}, b"1234567", "damaged"),
        ({"a": entry("F64", [1], 0, 8)}, bytes(8), "F64, which MLX does not read"),
        (b"[" * 100_000, b"", "damaged"),
        ({"a\nb": entry("F32", [2], 0, 8)}, bytes(8), "a tensor is called"),
    ],
)
def test_a_damaged_header_is_refused_in_one_line_with_the_files_name(
    tmp_path: Path, header: Any, data: bytes, says: str
) -> None:
    file = raw_file(tmp_path / "x.safetensors", header, data)
    text = refusal(CheckpointError, read_header, file)
    assert says in text and "x.safetensors" in text and len(text) < 400


# Names of models


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "broken link" in refusal(SourceError, resolve, str(tmp_path / "link"))


@pytest.mark.parametrize(
    "name",
    ["", "a/b/c", "/none/here", "./none", "~nobody/none", "weights/none", "x\ny", "long " * 1000],
)
def test_what_can_be_no_hub_name_is_named(name: str) -> None:
    assert "there is no directory" in refusal(SourceError, resolve, name)


def test_what_came_with_the_program_is_meant_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Path(__file__).parents[2] / "weights" / "py-llama"
    monkeypatch.chdir(tmp_path)
    assert resolve("weights/py-llama") == shipped
    local = Path("weights/py-llama")
    local.mkdir(parents=True)
    assert resolve("weights/py-llama") == local


def resolve_in_a_process(name: str, home: Path, **settings: str) -> str:
    """The real huggingface_hub, with settings that it reads only once."""
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        "from mlx_specdec.errors import SourceError\n"
        f"try:\n    resolve({name!r})\n"
        "except SourceError as problem:\n    print(problem)\n"
    )
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**cleared, "HF_HOME": str(home), **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_offline_and_not_in_the_cache_says_so(tmp_path: Path) -> None:
    printed = resolve_in_a_process("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in printed and printed.count("\n") == 1


def test_a_directory_needs_no_hub_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        f"resolve({str(tmp_path)!r})\n"
        "assert 'huggingface_hub' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_the_time_of_a_download_is_not_called_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    directory, clock = Path(__file__).parents[2] / "weights" / "t5-enfr-draft", [0.0]

    def download(name: str, **options: Any) -> Path:
        clock[0] += 100
        return directory

    monkeypatch.setattr(loading, "resolve", download)
    monkeypatch.setattr(loading, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    assert loading.load("some/model", "some/draft").load_seconds == 0


def test_a_local_model_has_one_first_name_wherever_the_program_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "weights" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    typed = {tmp_path: "weights/tiny", model.parent: "tiny/", model: ".", Path("/"): str(model)}
    for place, name in typed.items():
        monkeypatch.chdir(place)
        first, *rest = names_of(name)
        assert first == "tiny"
        assert {"weights/tiny", str(model)} <= {*rest} and (name in rest or name == first)
    monkeypatch.chdir("/")
    assert names_of("weights/t5-enfr")[:2] == ("t5-enfr", "weights/t5-enfr")


def test_a_name_on_the_hub_stays_as_it_is() -> None:
    assert names_of("google/flan-t5-small") == ("google/flan-t5-small",)
