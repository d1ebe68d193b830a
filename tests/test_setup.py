"""scripts/setup.sh: what it installs where, and what it remembers; pip itself is a stub."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
case "$2" in
  venv) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  pip) echo "$@" >> pip.log ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a Python that installs nothing, on a machine that FAKE_UNAME names."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in (("python", PYTHON), ("uname", '#!/bin/sh\necho "$FAKE_UNAME"\n')):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def set_up(clone: Path, *flags: str, machine: str = "Linux x86_64") -> tuple[int, str, list[str]]:
    """The exit code, the output, and the arguments of pip other than for its version."""
    environment = {
        **os.environ,
        "PATH": f"{clone / 'bin'}:{os.environ['PATH']}",
        "PYTHON": str(clone / "bin" / "python"),
        "FAKE_UNAME": machine,
    }
    log = clone / "pip.log"
    log.unlink(missing_ok=True)
    command = ["bash", "scripts/setup.sh", *flags]
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    lines = log.read_text().splitlines() if log.exists() else []
    settings = [line.split()[-1] for line in lines if "--version" not in line]
    return done.returncode, done.stderr, settings


@pytest.mark.parametrize(
    ("machine", "flags", "installed"),
    [
        ("Linux x86_64", (), ".[fast-cpu,grammar,server]"),
        ("Linux x86_64", ("--dev",), ".[dev,fast-cpu,grammar,server]"),
        ("Linux x86_64", ("--small",), ".[grammar,server]"),
        ("Linux x86_64", ("--small", "--dev"), ".[dev,grammar,server]"),
        ("Linux aarch64", (), ".[grammar,server]"),
        ("Darwin arm64", ("--dev",), ".[dev,grammar,server]"),
    ],
)
def test_the_fast_blas_comes_by_default_on_linux_x86_alone(
    clone: Path, machine: str, flags: tuple[str, ...], installed: str
) -> None:
    assert set_up(clone, *flags, machine=machine)[2] == [installed]
    assert set_up(clone, *flags, machine=machine) == (0, "", [])


def test_what_was_requested_stays_until_something_else_is_requested(clone: Path) -> None:
    assert set_up(clone, "--small")[2] == [".[grammar,server]"]
    assert set_up(clone)[2] == []
    assert set_up(clone, "--dev")[2] == [".[dev,grammar,server]"]
    assert set_up(clone, "--fast-cpu")[2] == [".[dev,fast-cpu,grammar,server]"]
    assert set_up(clone)[2] == []
    assert set_up(clone, "--small")[2] == ["mkl", ".[dev,grammar,server]"]
