"""Choice and reading of files, names of models, and sizes."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_specdec import system
from mlx_specdec.checkpoints.formats.safetensors import read_header
from mlx_specdec.checkpoints.source import names_of, resolve
from mlx_specdec.engine import loading
from mlx_specdec.errors import CheckpointError

from ..support.checkpoints import raw_file, refusal

INDEX = "model.safetensors.index.json"


def test_a_control_groups_limit_counts_where_it_is_smaller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(system, "CONTROL_GROUPS", (tmp_path / "absent", tmp_path / "limit"))
    total = os.sysconf("SC_PAGESIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in (("max\n", total), ("12345678\n", 12345678), (str(1 << 62), total)):
        (tmp_path / "limit").write_text(text)
        assert system.memory() == expected


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
    monkeypatch.setattr(system, "memory", lambda: 2000)
    assert system.usable_memory() == expected


def gpu_alone(info: dict[str, int]) -> Callable[..., dict[str, int]]:
    """Return a `device_info` that knows the GPU, while the default device may be the CPU."""
    return lambda device=None: info if device == mx.gpu else {}


def test_the_memory_of_a_mac_is_known_on_its_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", gpu_alone({"memory_size": 1000}))
    assert system.memory() == 1000


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


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


def test_what_came_with_the_program_is_meant_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = Path(__file__).parents[2] / "weights" / "py-llama"
    monkeypatch.chdir(tmp_path)
    assert resolve("weights/py-llama") == shipped
    local = Path("weights/py-llama")
    local.mkdir(parents=True)
    assert resolve("weights/py-llama") == local


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
