"""The command line against a Hub on loopback: what a user sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.checkpoints.hub_server import Hub, Repository, serve
from tests.checkpoints.makers import write_t5


def convert(address: str, directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The convert command in an empty directory, with huggingface_hub's own settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    here = directory / "here"
    here.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, str(Path("convert.py").resolve()), *flags],
        env={**kept, "HF_HOME": str(directory / "home"), "HF_ENDPOINT": address},
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_model_of_the_hub_is_converted_by_its_name(tmp_path: Path) -> None:
    source = write_t5(tmp_path / "source")
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    with serve(Hub({"some/model": Repository(files)})) as address:
        done = convert(address, tmp_path, "--model", "some/model")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "here" / "weights" / "model"
    assert {"config.json", "model.safetensors", "spiece.model"} <= {
        f.name for f in written.iterdir()
    }
    assert (written / "spiece.model").read_bytes() == files["spiece.model"]


def test_what_the_hub_refuses_is_one_line_and_exit_code_2_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    hub = Hub()
    hub.refused = {"/": (401, "GatedRepo", "Access to model some/model is restricted")}
    with serve(hub) as address:
        done = convert(address, tmp_path, "--model", "some/model")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: some/model is gated") and done.stderr.count("\n") == 1
    assert list((tmp_path / "here").rglob("*")) == []
