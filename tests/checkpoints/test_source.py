from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_specdec.checkpoints.source import META, TORCH, WANTED, resolve, resolve_config
from mlx_specdec.errors import SourceError


def sentence(name: str, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        resolve(name, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Replaces the download; the answer is a path, or an exception to raise."""
    import huggingface_hub

    def answer(what: Any) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def snapshot_download(name: str, **options: Any) -> str:
            calls.append({"name": name, **options})
            if isinstance(what, Exception):
                raise what
            return str(what)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
        return calls

    return answer


def refused(kind: str) -> Exception:
    """One of huggingface_hub's errors, without the response that it was made from."""
    from huggingface_hub import errors

    found = getattr(errors, kind)
    problem: Exception = found.__new__(found)
    problem.args = ("401 Client Error.\n\nMore lines\nof text",)
    return problem


def test_a_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    assert "is a file" in sentence(str(file))


def test_a_broken_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "broken link" in sentence(str(tmp_path / "link"))


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a/b/c",
        "/none/here",
        "./none",
        "../none",
        "~nobody/none",
        "weights/none",
        "a b",
        "a--b",
        "x\ny",
        "x\0y",
        "-a",
        "long " * 1000,
    ],
)
def test_what_can_be_no_hub_name_never_reaches_the_hub(
    name: str, hub: Callable[[Any], list[dict[str, Any]]]
) -> None:
    calls = hub("/tmp")
    assert "there is no directory" in sentence(name)
    assert calls == []


def test_a_hub_name_is_downloaded_with_its_revision(
    tmp_path: Path, hub: Callable[[Any], list[dict[str, Any]]]
) -> None:
    calls, steps = hub(tmp_path), []
    found = resolve(
        "google/flan-t5-small", revision="main", progress=lambda *step: steps.append(step)
    )
    assert found == tmp_path and steps == [(0, 1), (1, 1)]
    assert calls[0]["name"] == "google/flan-t5-small" and calls[0]["revision"] == "main"
    assert calls[0]["allow_patterns"] == list(WANTED)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("model.safetensors", [WANTED]),
        ("pytorch_model.bin", [WANTED, TORCH]),
        ("consolidated.00.pth", [WANTED, TORCH, META]),
    ],
)
def test_torchs_files_are_fetched_only_where_there_are_no_safetensors_and_metas_last(
    tmp_path: Path,
    hub: Callable[[Any], list[dict[str, Any]]],
    held: str,
    wanted: list[tuple[str, ...]],
) -> None:
    (tmp_path / held).touch()
    calls = hub(tmp_path)
    assert resolve("google/t5-11b") == tmp_path
    assert [call["allow_patterns"] for call in calls] == [list(each) for each in wanted]
    assert not any("bin" in pattern or "pth" in pattern for pattern in WANTED)


@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (lambda: refused("GatedRepoError"), "gated"),
        (lambda: refused("RepositoryNotFoundError"), "neither a directory here nor a repository"),
        (lambda: refused("RevisionNotFoundError"), "no revision v9"),
        (lambda: refused("LocalEntryNotFoundError"), "cannot be reached"),
        (lambda: refused("HfHubHTTPError"), "401 Client Error."),
        (lambda: OSError(28, "No space left on device"), "disk is full"),
        (lambda: ConnectionResetError("reset\nby peer"), "reset"),
        (lambda: RuntimeError(), "RuntimeError"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence(
    problem: Callable[[], Exception],
    says: str,
    hub: Callable[[Any], list[dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub(problem())
    text = sentence("some/model", revision="v9")
    assert says in text and "some/model" in text


def resolve_in_a_process(name: str, home: Path, **settings: str) -> str:
    """The real huggingface_hub, with settings that it reads only once."""
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        "from mlx_specdec.errors import SourceError\n"
        f"try:\n    resolve({name!r})\n"
        "except SourceError as problem:\n    print(problem)\n"
    )
    cleared = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "roxy" not in k}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**cleared, "HF_HOME": str(home), **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def test_offline_and_not_in_the_cache_says_so(tmp_path: Path) -> None:
    said = resolve_in_a_process("some/model", tmp_path, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in said and said.count("\n") == 1


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path) -> None:
    said = resolve_in_a_process("some/model", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert "cannot be reached" in said and said.count("\n") == 1


def test_a_directory_needs_no_hub_library(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from mlx_specdec.checkpoints.source import resolve\n"
        f"resolve({str(tmp_path)!r})\n"
        "assert 'huggingface_hub' not in sys.modules and 'mlx.core' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_only_config_json_is_fetched_where_no_more_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    calls: list[tuple[str, str, str | None]] = []

    def hf_hub_download(name: str, file: str, *, revision: str | None) -> str:
        calls.append((name, file, revision))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert resolve_config("some/model", revision="v1") == tmp_path
    assert calls == [("some/model", "config.json", "v1")]
    assert resolve_config(str(tmp_path)) == tmp_path
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("EntryNotFoundError", "has no config.json"),
        ("GatedRepoError", "is gated"),
        ("LocalEntryNotFoundError", "cannot be reached"),
    ],
)
def test_a_configuration_that_cannot_be_fetched_is_told_in_a_sentence(
    kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def hf_hub_download(*_: str, **__: str | None) -> str:
        raise refused(kind)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    with pytest.raises(SourceError, match=words) as caught:
        resolve_config("some/model")
    assert "\n" not in str(caught.value)
