"""Models of LM Studio and ollama: found by their names, read where they are, and listed."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec import Options, SourceError, generate, load

from ..support.checkpoints import listing
from ..support.gguf_files import Gguf
from .support import ROOT, checkpoint, command

FIXTURES = ROOT / "tests" / "fixtures" / "gguf"
FILE = FIXTURES / "llama-f16.gguf"
LIBRARY = "manifests/registry.ollama.ai/library"
OPTIONS = Options(max_tokens=5, cost_cache=False)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without models, whose cache of this program is elsewhere."""
    for variable in ("HF_HOME", "OLLAMA_MODELS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def lmstudio(folder: Path, name: str, file: Path | None = FILE) -> Path:
    """Put a GGUF file, or a small Llama in MLX's format, where LM Studio keeps it."""
    place = folder / name
    if file is None:
        return checkpoint(place)
    place.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(file, place / file.name))


def ollama(folder: Path, manifest: str, file: Path = FILE, **changes: Any) -> Path:
    """Put a GGUF file where ollama keeps it, and return the blob."""
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    blob, place = folder / "blobs" / f"sha256-{digest}", folder / manifest
    for directory in (blob.parent, place.parent):
        directory.mkdir(parents=True, exist_ok=True)
    shutil.copy(file, blob)
    kinds = {"model": f"sha256:{digest}", "template": f"sha256:{'0' * 64}", **changes}
    prefix = "application/vnd.ollama.image"
    layers = [{"mediaType": f"{prefix}.{kind}", "digest": kinds[kind]} for kind in kinds]
    place.write_text(json.dumps({"schemaVersion": 2, "layers": layers}))
    return blob


def rows() -> dict[str, str]:
    """Return the name of each listed model -> the rest of its line."""
    done = command("models")
    assert (done.code, done.err) == (0, "")
    lines = (line.strip().partition(" ") for line in done.out.splitlines())
    return {name: rest.strip() for name, _, rest in lines if name}


@pytest.mark.parametrize("where", ["default", "older", "pointer", "settings"])
def test_models_of_lm_studio_are_found_where_it_keeps_them(
    where: str, home: Path, tmp_path: Path
) -> None:
    places = {
        "default": home / ".lmstudio" / "models",
        "older": home / ".cache" / "lm-studio" / "models",
        "pointer": tmp_path / "drive" / "models",
        "settings": tmp_path / "elsewhere",
    }
    if where == "pointer":
        (home / ".lmstudio-home-pointer").write_text(f"{tmp_path / 'drive'}\n")
    if where == "settings":
        (home / ".lmstudio").mkdir()
        settings = json.dumps({"downloadsFolder": str(places[where])})
        (home / ".lmstudio" / "settings.json").write_text(settings)
    lmstudio(places[where], "maker/small")
    expected = generate(load(FILE), [3, 4], OPTIONS).tokens
    assert generate(load("lmstudio:maker/small"), [3, 4], OPTIONS).tokens == expected
    assert "lmstudio:maker/small" in rows()


def test_a_folder_of_lm_studio_may_hold_several_files(home: Path) -> None:
    folder = home / ".lmstudio" / "models"
    first = lmstudio(folder, "maker/small")
    (first.parent / "mmproj-small.gguf").write_bytes(b"GGUF")
    lmstudio(folder, "maker/mlx", None)
    assert load("lmstudio:maker/small").name == "lmstudio:maker/small"
    assert load("lmstudio:maker/mlx").tokenizer.encode("x")
    lmstudio(folder, "maker/small", FIXTURES / "llama-q5.gguf")
    names = [f"lmstudio:maker/small/llama-{kind}.gguf" for kind in ("f16", "q5")]
    with pytest.raises(SourceError, match=f"holds 2 models: name one, {' or '.join(names)}"):
        load("lmstudio:maker/small")
    assert load(names[0]).eos_token_ids
    assert {*names, "lmstudio:maker/mlx"} <= rows().keys()


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("small:1b", f"{LIBRARY}/small/1b"),
        ("small", f"{LIBRARY}/small/latest"),
        ("someone/small:1b", "manifests/registry.ollama.ai/someone/small/1b"),
        ("hf.co/some/model:Q4_K_M", "manifests/hf.co/some/model/Q4_K_M"),
    ],
)
@pytest.mark.parametrize("where", ["default", "variable"])
def test_models_of_ollama_are_found_by_its_names_and_nothing_is_written_there(
    where: str,
    name: str,
    manifest: str,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = home / ".ollama" / "models"
    if where == "variable":
        folder = tmp_path / "drive"
        monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    ollama(folder, manifest)
    before = listing(folder)
    expected = generate(load(FILE), [3, 4], OPTIONS).tokens
    assert generate(load(f"ollama:{name}"), [3, 4], OPTIONS).tokens == expected
    assert f"ollama:{name if ':' in name else f'{name}:latest'}" in rows()
    assert listing(folder) == before and [*home.rglob("*.gguf")] == []


def test_the_list_says_what_runs_and_why_not(home: Path, tmp_path: Path) -> None:
    folder = home / ".ollama" / "models"
    ollama(folder, f"{LIBRARY}/small/1b")
    ollama(folder, f"{LIBRARY}/nomic/latest", Gguf("nomic-bert").write(tmp_path / "b.gguf"))
    ollama(folder, f"{LIBRARY}/tuned/latest", adapter=f"sha256:{'1' * 64}")
    ollama(folder, f"{LIBRARY}/gone/latest", model=f"sha256:{'2' * 64}")
    (folder / LIBRARY / "odd").mkdir()
    (folder / LIBRARY / "odd" / "latest").write_text("[]")
    strange = lmstudio(home / ".lmstudio" / "models", "maker/strange", None)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps({**config, "model_type": "warp_drive"}))
    found = rows()
    size = f"{FILE.stat().st_size / 1000:.1f} kB"
    assert found["ollama:small:1b"].startswith(f"{size}   gguf")
    assert found["ollama:small:1b"].endswith(" yes")
    for name, reason in {
        "ollama:nomic:latest": "architecture 'nomic-bert'",
        "ollama:tuned:latest": "has an adapter, which is not read here",
        "ollama:gone:latest": "is missing: pull the model again",
        "ollama:odd:latest": "is no manifest of ollama",
        "lmstudio:maker/strange": "model_type 'warp_drive' is not supported",
    }.items():
        assert reason in found[name], name


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("generate x --model ollama:none:1b", "ollama has no none:1b in"),
        ("generate x --model ollama:a/b/c/d", "ollama has no a/b/c/d in"),
        ("generate x --model lmstudio:maker/none", "LM Studio has no maker/none in"),
        ("convert --model lmstudio:none", "mlx-specdec models lists what there is"),
        ("models remove ollama:none:1b", "belongs to another program: remove it there"),
    ],
)
def test_what_is_not_there_is_one_line(words: str, part: str) -> None:
    command(*words.split()).refuses(part)
