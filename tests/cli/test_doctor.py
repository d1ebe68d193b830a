"""`doctor`: one line a fact, and after them what to do about each problem."""

import platform
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_specdec import process
from mlx_specdec.checkpoints import disk
from mlx_specdec.models import number_format
from mlx_specdec.version import __version__

from ..checkpoints.test_stored_models import cache as cache
from ..support.commands import Run

GB = 10**9


@pytest.fixture(autouse=True)
def healthy(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine on which nothing is wrong, except for a model that was only begun."""
    monkeypatch.setenv(process.PLACE, str(tmp_path / "own"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    monkeypatch.setattr(process, "is_slow", lambda: False)
    monkeypatch.setattr(disk, "free", lambda place: 500 * GB)
    monkeypatch.setattr(disk, "usable_memory", lambda: 64 * GB)
    monkeypatch.setattr(number_format, "on_cpu", lambda: False)


def test_facts_and_choices_are_reported(run: Run, cache: Path) -> None:
    (cache / "models--begun").rename(cache / "begun")
    done = run("doctor")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\nNo problems were found.\n")
    facts = dict(line.split("  ", 1) for line in done.out.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["mlx-specdec"].startswith(__version__)
    assert f"Python {platform.python_version()}" in facts["system"]
    assert facts["extra server"] == "installed" or facts["extra server"].startswith("no: ")
    assert "mlx " in facts["packages"] and "mlx-lm " in facts["packages"]
    assert "60.0 GB for models and caches" in facts["memory"]
    assert facts["cache of the Hub"] == f"{cache}: 1 model, 1.0 kB, 500.0 GB free"
    assert facts["own cache"].endswith("own: 0 bytes")
    assert facts["downloads"] == "allowed"
    assert facts["fits for chat"].startswith("mlx-community/Qwen3.8-27B-8bit with ")
    assert facts["fits for code"].endswith("GB")


def test_every_problem_comes_with_what_to_do(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(process, "is_slow", lambda: True)
    monkeypatch.setattr(number_format, "on_cpu", lambda: True)
    monkeypatch.setattr(disk, "free", lambda place: GB)
    monkeypatch.setattr(disk, "usable_memory", lambda: GB)
    output = " ".join(run("doctor").out.split())
    assert "BLAS of the CPU: install the faster one" in output
    assert "cache of the Hub: make room: 1.0 GB are free" in output
    assert "downloads: HF_HUB_OFFLINE forbids downloads: unset it" in output
    assert "fits for code: no pair for code fits" in output
    assert "No problems" not in output


@pytest.mark.parametrize(
    ("version", "processor", "advice"),
    [
        ("13.6", "arm64", "MLX needs macOS 14 or newer"),
        ("15.1", "x86_64", "install an arm64 Python"),
        ("26.2", "arm64", ""),
    ],
)
def test_a_mac_that_is_too_old_or_runs_the_wrong_python_is_told(
    run: Run, monkeypatch: pytest.MonkeyPatch, version: str, processor: str, advice: str
) -> None:
    monkeypatch.setattr(platform, "mac_ver", lambda: (version, ("", "", ""), processor))
    monkeypatch.setattr(platform, "machine", lambda: processor)
    output = " ".join(run("doctor").out.split())
    assert f"macOS {version}" in output
    system = output.partition(" system: ")[2]
    assert bool(system) == bool(advice) and advice in system


def test_a_download_that_was_cut_is_named(run: Run) -> None:
    assert "cache of the Hub: begun came without weights" in run("doctor").out
