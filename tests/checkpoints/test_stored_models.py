"""The models on the disk: those in huggingface_hub's cache, and those in weights/."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_specdec.checkpoints import stored_models as stored
from mlx_specdec.errors import SourceError

WEIGHTS = b"0" * 1000


def put(cache: Path, name: str, files: dict[str, bytes], commit: str = "c0ffee") -> None:
    """Write a repository to a cache as huggingface_hub does, with links to its blobs."""
    place = cache / f"models--{name.replace('/', '--')}"
    snapshot = place / "snapshots" / commit
    for directory in (snapshot, place / "blobs", place / "refs"):
        directory.mkdir(parents=True, exist_ok=True)
    (place / "refs" / "main").write_text(commit)
    for file, content in files.items():
        blob = place / "blobs" / f"{commit}-{file}"
        blob.write_bytes(content)
        (snapshot / file).symlink_to(blob)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub with two models, and weights/ with one."""
    cache, root = tmp_path / "hub", tmp_path / "root"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(stored, "ROOT", root)
    config = b'{"model_type": "llama"}'
    put(cache, "some/model-4bit", {"config.json": config, "model.safetensors": WEIGHTS})
    put(cache, "begun", {"config.json": b"no JSON"})
    put(cache.parent / "data", "some/data", {})
    (cache / "datasets--some--data" / "snapshots").mkdir(parents=True)
    (root / "weights" / "mine").mkdir(parents=True)
    (root / "weights" / "mine" / "config.json").write_bytes(config)
    (root / "weights" / "mine" / "model.safetensors").write_bytes(WEIGHTS)
    return cache


def test_all_models_are_listed_with_what_they_take(cache: Path) -> None:
    assert stored.names() == ["begun", "some/model-4bit", "weights/mine"]
    assert stored.typed_names() == ["some/model-4bit", "weights/mine"]
    begun, whole, mine = stored.stored_models()
    assert [one.name for one in (begun, whole, mine)] == stored.names()
    assert (whole.nbytes, whole.type, whole.in_hub, whole.complete) == (1023, "llama", True, True)
    assert (begun.type, begun.complete, begun.in_hub) == ("", False, True)
    assert (mine.nbytes, mine.type, mine.in_hub, mine.complete) == (1023, "llama", False, True)
    assert min(one.used for one in (begun, whole, mine)) > 0


def test_a_model_is_removed_with_all_its_revisions(cache: Path) -> None:
    newer = {"config.json": b"{}", "model.safetensors": WEIGHTS * 2}
    put(cache, "some/model-4bit", newer, commit="beefed")
    assert stored.remove("some/model-4bit") == 1023 + 2002
    assert stored.names() == ["begun", "weights/mine"]
    with pytest.raises(SourceError, match="has no some/model-4bit: mlx-specdec models lists"):
        stored.remove("some/model-4bit")


def test_no_cache_is_an_empty_one(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "nowhere"))
    assert stored.names() == ["weights/mine"]
    assert [one.name for one in stored.stored_models()] == ["weights/mine"]
