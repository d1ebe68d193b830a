"""The command line against a Hub on loopback: what a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..support.checkpoints import write_t5
from ..support.hub_server import Hub, serve


def start(address: str, directory: Path, *flags: str) -> subprocess.Popen[str]:
    """The convert command in a directory of its own, with huggingface_hub's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    here = directory / "here"
    here.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(Path("convert.py").resolve()), *flags],
        env={**kept, "HF_HOME": str(directory / "home"), "HF_ENDPOINT": address},
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def convert(address: str, directory: Path, *flags: str) -> tuple[int, str, str]:
    """Its exit code and what it wrote to both streams."""
    with start(address, directory, *flags) as running:
        out, err = running.communicate()
    return running.returncode, out, err


def test_a_model_of_the_hub_is_converted_by_its_name(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    with serve(Hub(files)) as address:
        code, _, err = convert(address, tmp_path, "--model", "some/model")
    assert code == 0, err
    written = tmp_path / "here" / "weights" / "model"
    assert {"config.json", "model.safetensors", "spiece.model"} <= {
        f.name for f in written.iterdir()
    }
    assert (written / "spiece.model").read_bytes() == files["spiece.model"]


def test_what_the_hub_refuses_is_one_line_and_exit_code_2_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    hub = Hub()
    hub.refused = {"/": (401, "GatedRepo")}
    with serve(hub) as address:
        code, out, err = convert(address, tmp_path, "--model", "some/model")
    assert code == 2 and out == ""
    assert err.startswith("error: some/model is gated") and err.count("\n") == 1
    assert list((tmp_path / "here").rglob("*")) == []


@pytest.mark.slow
def test_a_download_that_was_killed_leaves_no_model_and_is_made_good(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "source")
    hub = Hub({file.name: file.read_bytes() for file in source.iterdir()})
    hub.trickles = True
    with serve(hub) as address:
        with start(address, tmp_path, "--model", "some/model") as running:
            assert hub.trickled.wait(60)
            running.kill()
        assert list((tmp_path / "here").rglob("*")) == []
        assert not list((tmp_path / "home").rglob("model.safetensors"))
        hub.trickles = False
        code, _, err = convert(address, tmp_path, "--model", "some/model")
    assert code == 0, err
