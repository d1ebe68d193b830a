"""`doctor`: one line a fact, and after them what to do about each problem."""

import collections
import platform
import shutil
from pathlib import Path

import pytest

from .machines import Pretend, pretender, put
from .support import Outcome, command

GB = 10**9
Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    files = {"config.json": b'{"model_type": "llama"}', "model.safetensors": b"0" * 1000}
    put(cache, "some/model-4bit", files)
    return cache


@pytest.fixture(autouse=True)
def machine(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretend:
    """A machine on which nothing is wrong."""
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path / "own"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("", ("", "", ""), ""))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(900 * GB, 400 * GB, 500 * GB))
    pretend = pretender(monkeypatch)
    pretend(64 * GB)
    return pretend


def sentences(done: Outcome) -> str:
    assert (done.code, done.err) == (0, "")
    return " ".join(done.out.split())


def test_facts_and_choices_are_reported(cache: Path) -> None:
    done = command("doctor")
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("\nNo problems were found.\n")
    facts = dict(line.split("  ", 1) for line in done.out.splitlines() if "  " in line)
    facts = {name: value.strip() for name, value in facts.items()}
    version = command("--version").out.split()[-1]
    assert facts["mlx-specdec"].startswith(version)
    assert f"Python {platform.python_version()}" in facts["system"]
    assert facts["extra server"] == "installed" or facts["extra server"].startswith("no: ")
    assert "mlx " in facts["packages"] and "mlx-lm " in facts["packages"]
    assert "60.0 GB for models and caches" in facts["memory"]
    assert facts["cache of the Hub"] == f"{cache}: 1 model, 1.0 kB, 500.0 GB free"
    assert facts["own cache"].endswith("own: 0 bytes")
    assert facts["downloads"] == "allowed"
    assert facts["fits for chat"].startswith("mlx-community/Qwen3.8-27B-4bit with ")
    assert facts["fits for code"].endswith("GB")


def test_every_problem_comes_with_what_to_do(
    machine: Pretend, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(cache, "begun", {"config.json": b"no JSON"})
    assert "cache of the Hub: begun came without weights" in sentences(command("doctor"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(9 * GB, 8 * GB, GB))
    machine(GB)
    said = sentences(command("doctor"))
    assert "cache of the Hub: make room: 1.0 GB are free" in said
    assert "downloads: HF_HUB_OFFLINE forbids downloads: unset it" in said
    assert "fits for code: no pair for code fits" in said
    assert "No problems" not in said
