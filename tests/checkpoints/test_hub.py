"""Downloads from a Hub that is a real server on loopback, through the real huggingface_hub."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download
from huggingface_hub.utils import _http, enable_progress_bars

from mlx_specdec.checkpoints import files, shards
from mlx_specdec.checkpoints.hub import repository as hub_repository
from mlx_specdec.checkpoints.source import resolve, resolve_config
from mlx_specdec.errors import CheckpointError, SourceError
from mlx_specdec.models.loading import load_model

from .hub_server import Hub, Repository, digest, serve

NAME = "some/model"
LIST = f"/api/models/{NAME}"
CONFIG = b'{"model_type": "t5"}'
WEIGHTS = bytes(range(256)) * 40
SMALL: dict[str, bytes] = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "spiece.model": b"pieces",
}
WHOLE: dict[str, bytes] = {**SMALL, "model.safetensors": WEIGHTS}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model; huggingface_hub asks it, keeps files aside and does not pause."""
    held = Hub({NAME: Repository(WHOLE)})
    for name in [name for name in os.environ if name.startswith("HF_") or "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    with serve(held) as address:
        for setting, value in {
            "ENDPOINT": address,
            "HUGGINGFACE_CO_URL_TEMPLATE": address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "cache"),
            "HF_TOKEN_PATH": str(tmp_path / "token"),
            "HF_STORED_TOKENS_PATH": str(tmp_path / "tokens"),
            "HF_HUB_OFFLINE": False,
            "HF_HUB_ETAG_TIMEOUT": 20,
            "HF_HUB_DOWNLOAD_TIMEOUT": 20,
            "DOWNLOAD_CHUNK_SIZE": 1000,
        }.items():
            monkeypatch.setattr(constants, setting, value)
        hasty = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
        for module in (file_download, _http):
            monkeypatch.setattr(module, "time", hasty)
        huggingface_hub.close_session()
        yield held
        huggingface_hub.close_session()


def refused(name: str = NAME, **options: Any) -> str:
    """The one sentence that the user reads."""
    with pytest.raises((SourceError, CheckpointError)) as caught:
        resolve(name, **options)
    text = str(caught.value)
    assert "\n" not in text and "http" not in text.replace("huggingface.co", "")
    return text


def held_in(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def cached(tmp_path: Path) -> list[str]:
    """What lies in snapshots and blobs: names of whole files and of any that are not."""
    found = [
        path for path in (tmp_path / "cache").rglob("*") if path.is_symlink() or path.is_file()
    ]
    kinds = ("snapshots", "blobs")
    return sorted(path.name for path in found if set(kinds) & set(path.parts))


def test_a_model_arrives_whole_and_is_not_fetched_again(hub: Hub) -> None:
    directory = resolve(NAME)
    assert held_in(directory) == WHOLE
    hub.requests.clear()
    assert resolve(NAME) == directory
    assert [request.path for request in hub.requests] == [f"{LIST}/revision/main"]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["model.fp16.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["consolidated.00.pth", "consolidated.01.pth"], None),
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["only.Q4_0.gguf"], ["only.Q4_0.gguf"]),
        (["model.safetensors", "only.gguf"], ["model.safetensors"]),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        (["medusa_lm_head.pt", "medusa_lm_head.safetensors"], ["medusa_lm_head.safetensors"]),
        (["medusa_lm_head.pt"], None),
    ],
)
def test_only_the_first_format_that_can_be_read_is_fetched(
    weights: list[str], wanted: list[str] | None, hub: Hub
) -> None:
    copies = {
        name: name.encode()
        for name in (
            "tf_model.h5",
            "flax_model.msgpack",
            "model.onnx",
            "onnx/decoder.onnx",
            "original/consolidated.00.pth",
            "rust_model.ot",
            "modeling_model.py",
            "README.md",
            ".gitattributes",
            "flax_model.msgpack.index.json",
        )
    }
    files = {**SMALL, **copies, **{name: name.encode() for name in weights}}
    hub.repositories[NAME] = Repository(files)
    directory = resolve(NAME)
    assert set(held_in(directory)) == {*SMALL, *(weights if wanted is None else wanted)}
    assert sorted(hub.fetched()) == sorted(held_in(directory))


def test_an_index_says_which_weights_are_fetched(hub: Hub) -> None:
    shard, index = "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json"
    places = json.dumps({"weight_map": {"a": shard}}).encode()
    other = {"pytorch_model-00001-of-00002.bin": b"other", "pytorch_model.bin": b"another"}
    hub.repositories[NAME] = Repository({**SMALL, index: places, shard: WEIGHTS, **other})
    assert set(held_in(resolve(NAME))) == {*SMALL, index, shard}


@pytest.mark.parametrize(
    "named", ["../../model.safetensors", "/etc/model.safetensors", "a/../b.safetensors", "x.py"]
)
def test_an_index_that_names_another_place_is_refused_before_weights_are_fetched(
    named: str, hub: Hub
) -> None:
    index = "model.safetensors.index.json"
    places = json.dumps({"weight_map": {"a": "m.safetensors", "b": named}}).encode()
    hub.repositories[NAME] = Repository({**SMALL, index: places, "m.safetensors": WEIGHTS})
    assert "no safetensors file of its directory" in refused()
    assert set(hub.fetched()) == {*SMALL, index}


def test_an_index_that_names_what_is_not_there_is_refused_before_weights_are_fetched(
    hub: Hub,
) -> None:
    index = "model.safetensors.index.json"
    places = json.dumps({"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}).encode()
    hub.repositories[NAME] = Repository({**SMALL, index: places, "m.safetensors": WEIGHTS})
    assert "lacks n.safetensors" in refused()
    assert set(hub.fetched()) == {*SMALL, index}


def test_names_that_the_hub_lists_outside_of_the_repository_are_never_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    evil = {"../up.json": b"{}", "/tmp/root.json": b"{}", "..\\up.json": b"{}", "a\n.json": b"{}"}
    hub.repositories[NAME] = Repository({**WHOLE, **evil})
    assert held_in(resolve(NAME)) == WHOLE
    assert not list(tmp_path.rglob("up.json"))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"tf_model.h5": b"", "config.json": CONFIG}, "only such as tf_model.h5"),
        ({"config.json": CONFIG}, "no weights that can be read here"),
        ({}, "no weights that can be read here"),
        ({"a.Q4_0.gguf": b"a", "a.Q8_0.gguf": b"b"}, "hf download some/model a.Q4_0.gguf"),
    ],
)
def test_a_repository_without_one_model_says_so_and_fetches_nothing(
    files: dict[str, bytes], says: str, hub: Hub, tmp_path: Path
) -> None:
    hub.repositories[NAME] = Repository(files)
    assert says in refused()
    assert cached(tmp_path) == []


def test_a_cut_connection_goes_on_where_it_was(hub: Hub) -> None:
    hub.cuts = [4000, 3000]
    assert held_in(resolve(NAME)) == WHOLE
    ranges = [each.range for each in hub.requests if each.path.startswith("/cdn/")]
    assert ranges == ["", "bytes=4000-", "bytes=7000-"]


def test_a_connection_that_is_always_cut_is_told_and_leaves_no_weights(
    hub: Hub, tmp_path: Path
) -> None:
    hub.cuts = [100, *[0] * 20]
    text = refused()
    assert "model.safetensors of some/model" in text and "connection was cut" in text
    assert "model.safetensors" not in cached(tmp_path)
    assert not [name for name in cached(tmp_path) if name.endswith(".incomplete")]
    hub.cuts.clear()
    hub.requests.clear()
    assert held_in(resolve(NAME)) == WHOLE
    assert hub.fetched() == ["model.safetensors"]


def test_a_connection_that_is_reset_is_begun_again(hub: Hub) -> None:
    hub.cuts, hub.reset = [5000, 100], True
    assert held_in(resolve(NAME)) == WHOLE
    assert hub.fetched().count("model.safetensors") == 3


def test_a_connection_that_is_always_reset_is_told(hub: Hub, tmp_path: Path) -> None:
    hub.cuts, hub.reset = [100] * 20, True
    assert "connection was cut" in refused()
    assert hub.fetched().count("model.safetensors") == 1 + hub_repository.RESETS
    assert not [name for name in cached(tmp_path) if name.endswith(".incomplete")]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_what_is_not_what_the_list_promised_is_removed(file: str, hub: Hub, tmp_path: Path) -> None:
    hub.altered = {file: bytes(len(WHOLE[file]))}
    text = refused()
    assert f"{file} of some/model arrived damaged" in text
    assert file not in cached(tmp_path) and digest(WHOLE[file]) not in cached(tmp_path)
    hub.altered.clear()
    assert held_in(resolve(NAME)) == WHOLE


def test_what_arrived_damaged_and_unnoticed_is_found_before_it_is_used(
    hub: Hub, tmp_path: Path
) -> None:
    """The process was killed after a file was in its place and before it was looked at."""
    hub.altered = {"model.safetensors": bytes(len(WEIGHTS))}
    commit = hub.repositories[NAME].commit
    huggingface_hub.hf_hub_download(NAME, "model.safetensors", revision=commit)
    assert "arrived damaged" in refused()
    hub.altered.clear()
    assert held_in(resolve(NAME)) == WHOLE


def test_what_a_killed_download_left_is_swept(hub: Hub, tmp_path: Path) -> None:
    blobs = tmp_path / "cache" / "models--some--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest(WEIGHTS)}.0123abcd.incomplete").write_bytes(WEIGHTS[:99])
    assert held_in(resolve(NAME)) == WHOLE
    assert not [name for name in cached(tmp_path) if name.endswith(".incomplete")]


@pytest.mark.parametrize("size", [len(WEIGHTS) - 1, len(WEIGHTS) + 1])
def test_a_file_of_another_size_is_told(size: int, hub: Hub, tmp_path: Path) -> None:
    hub.altered = {"model.safetensors": bytes(size)}
    text = refused()
    assert "model.safetensors of some/model did not arrive whole" in text
    assert "model.safetensors" not in cached(tmp_path)


def test_a_list_that_promises_another_size_is_told(hub: Hub) -> None:
    said = {"sha256": digest(WEIGHTS), "size": len(WEIGHTS) + 5, "pointerSize": 134}
    hub.listed = {"model.safetensors": {"lfs": said}}
    assert "arrived damaged" in refused()


def test_a_mirror_that_lists_no_digests_is_believed(hub: Hub) -> None:
    hub.listed = {name: {"size": None, "blobId": None, "lfs": None} for name in WHOLE}
    assert held_in(resolve(NAME)) == WHOLE


@pytest.mark.parametrize(
    "said",
    [
        {"rfilename": 5},
        {"rfilename": ["config.json"]},
        {"size": "many"},
        {"size": -1},
        {"size": True},
        {"blobId": "../../up"},
        {"blobId": 5},
        {"lfs": 7},
        {"lfs": {"sha256": "x" * 64, "size": 1, "pointerSize": 1}},
        {"lfs": {}, "blobId": "A" * 40},
    ],
)
def test_a_list_that_makes_no_sense_is_told(said: dict[str, Any], hub: Hub) -> None:
    hub.listed = {"config.json": said}
    assert "what answers is no Hub" in refused()


PAGES = [
    b"<html>please log in</html>",
    b"\xff\xfe",
    b"",
    b"null",
    b"[]",
    b"{}",
    b'{"id": "a", "sha": "../x"}',
    b'{"id": "a", "sha": "' + b"1" * 40 + b'", "siblings": 5}',
    b'{"id": "a", "sha": "' + b"1" * 40 + b'", "siblings": [[]]}',
    b'{"id": "a", "sha": "' + b"1" * 40 + b'", "siblings": {"a": 1}}',
]


@pytest.mark.parametrize("page", PAGES)
def test_what_is_no_hub_is_told(page: bytes, hub: Hub) -> None:
    hub.page = page
    assert "what answers is no Hub" in refused()


REFUSALS = {
    "a token that is unknown": (
        LIST,
        (401, "", "Invalid credentials in Authorization header"),
        "does not know your token",
    ),
    "a private repository": (LIST, (401, "RepoNotFound", "Repository not found"), "hf auth login"),
    "a private repository, plainly": (LIST, (401, "", ""), "hf auth login"),
    "a gated repository": (
        f"/{NAME}/resolve",
        (403, "GatedRepo", "Access to model some/model is restricted"),
        "accept its terms on huggingface.co/some/model",
    ),
    "a gated repository, without a token": (
        f"/{NAME}/resolve",
        (401, "GatedRepo", "Access to model some/model is restricted"),
        "accept its terms on huggingface.co/some/model",
    ),
    "a token without the right": (f"/{NAME}/resolve", (403, "", "no"), "does not let your token"),
    "a disabled repository": (
        LIST,
        (403, "", "Access to this resource is disabled."),
        "has been disabled",
    ),
    "too many requests": (LIST, (429, "", "slow down"), "too many requests"),
    "an error of the Hub": (LIST, (503, "", "down"), "error 503: try again later"),
    "an error of the Hub on the way": (f"/{NAME}/resolve", (500, "", "down"), "error 500"),
    "an error of the host of large files": ("/cdn", (403, "", "expired"), "model.safetensors"),
    "a file that is listed and missing": (
        f"/{NAME}/resolve",
        (404, "EntryNotFound", "Entry not found"),
        "the Hub has no config.json of some/model",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_hub_refuses_is_one_sentence_and_leaves_no_weights(
    case: str, hub: Hub, tmp_path: Path
) -> None:
    start, answer, says = REFUSALS[case]
    hub.refused = {start: answer}
    text = refused()
    assert says in text and ("some/model" in text or "token" in text)
    assert "model.safetensors" not in cached(tmp_path)
    hub.refused.clear()
    assert held_in(resolve(NAME)) == WHOLE


def test_a_repository_that_is_not_there_is_told(hub: Hub) -> None:
    assert "no/such is neither a directory here nor a repository" in refused("no/such")


def test_a_name_that_is_too_long_for_the_hub_is_told(hub: Hub) -> None:
    assert "cannot be a name on the Hub" in refused("a" * 120)


def test_a_revision_that_is_not_there_is_told_though_the_cache_has_others(hub: Hub) -> None:
    resolve(NAME)
    assert "has no revision v9: check --revision" in refused(revision="v9")


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "2" * 40])
def test_a_revision_is_fetched_as_it_was(revision: str, hub: Hub) -> None:
    hub.repositories[NAME] = Repository(WHOLE, "2" * 40, ("main", "v1.0", "refs/pr/1"))
    directory = resolve(NAME, revision=revision)
    assert held_in(directory) == WHOLE and directory.name == "2" * 40


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets huggingface_hub wait for an answer a fifth of a second only."""

    def change() -> None:
        monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
        monkeypatch.setattr(file_download, "_ETAG_RETRY_TIMEOUT", 0.2)

    return change


@pytest.mark.parametrize("start", [LIST, f"/{NAME}/resolve", "/cdn"])
def test_a_server_that_does_not_answer_is_not_waited_for(
    start: str, hub: Hub, tmp_path: Path, impatient: Callable[[], None]
) -> None:
    impatient()
    hub.stalled = (start,)
    assert "takes too long to answer" in refused()
    assert "model.safetensors" not in cached(tmp_path)


def test_the_cache_serves_where_the_hub_does_not_answer(
    hub: Hub, impatient: Callable[[], None]
) -> None:
    directory = resolve(NAME)
    impatient()
    hub.stalled = ("/",)
    assert resolve(NAME) == directory
    assert resolve_config(NAME) == directory


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_the_cache_serves_where_the_hub_refuses(status: int, hub: Hub) -> None:
    directory = resolve(NAME)
    hub.refused = {"/": (status, "", "no")}
    assert resolve(NAME) == directory


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_offline_takes_the_cache_and_asks_nobody(hub: Hub, offline: Callable[[], None]) -> None:
    directory = resolve(NAME)
    offline()
    hub.requests.clear()
    assert resolve(NAME) == directory and resolve_config(NAME) == directory
    assert hub.requests == []


@pytest.mark.parametrize("revision", ["v1.0", "1" * 40])
def test_offline_takes_a_revision_by_its_name(
    revision: str, hub: Hub, offline: Callable[[], None]
) -> None:
    hub.repositories[NAME] = Repository(WHOLE, revisions=("main", "v1.0"))
    directory = resolve(NAME, revision=revision)
    offline()
    assert resolve(NAME, revision=revision) == directory


def test_offline_without_a_cache_is_told(hub: Hub, offline: Callable[[], None]) -> None:
    offline()
    assert "HF_HUB_OFFLINE forbids" in refused()
    assert hub.requests == []


def test_offline_with_a_part_of_a_model_is_told(hub: Hub, offline: Callable[[], None]) -> None:
    resolve_config(NAME)
    offline()
    text = refused()
    assert "holds only a part of some/model" in text and "HF_HUB_OFFLINE" in text


def test_offline_with_a_shard_missing_is_told(hub: Hub, offline: Callable[[], None]) -> None:
    index, names = "model.safetensors.index.json", ["a.safetensors", "b.safetensors"]
    places = json.dumps({"weight_map": dict(zip("xy", names, strict=True))}).encode()
    shards_ = {name: name.encode() for name in names}
    hub.repositories[NAME] = Repository({**SMALL, index: places, **shards_})
    directory = resolve(NAME)
    (directory / names[1]).unlink()
    offline()
    assert "holds only a part" in refused()


def test_offline_takes_a_model_that_is_one_file(hub: Hub, offline: Callable[[], None]) -> None:
    hub.repositories[NAME] = Repository({"README.md": b"", "only.Q8_0.gguf": b"GGUF"})
    directory = resolve(NAME)
    offline()
    assert resolve(NAME) == directory
    assert held_in(directory) == {"only.Q8_0.gguf": b"GGUF"}


def test_a_glance_at_a_newer_configuration_keeps_the_model_of_before_for_use_offline(
    hub: Hub, offline: Callable[[], None]
) -> None:
    before = resolve(NAME)
    hub.repositories[NAME] = Repository({**WHOLE, "config.json": b"{}"}, "2" * 40)
    assert held_in(resolve_config(NAME)) == {"config.json": b"{}"}
    offline()
    assert resolve(NAME) == before


def test_an_update_that_broke_off_leaves_the_model_of_before_for_use_offline(
    hub: Hub, offline: Callable[[], None]
) -> None:
    before = resolve(NAME)
    hub.repositories[NAME] = Repository({**WHOLE, "model.safetensors": b"new" * 99}, "2" * 40)
    hub.cuts = [1] + [0] * 20
    assert "connection was cut" in refused()
    offline()
    assert resolve(NAME) == before


def test_only_the_hub_is_shown_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    resolve(NAME)
    shown = {request.path.startswith("/cdn/"): request.token for request in hub.requests}
    assert shown == {False: "Bearer hf_secret", True: ""}


def test_a_disk_without_room_is_told_before_anything_is_fetched(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = SimpleNamespace(disk_usage=lambda path: SimpleNamespace(free=5000))
    monkeypatch.setattr(hub_repository, "shutil", room)
    text = refused()
    assert "needs 10" in text and "make room" in text
    assert hub.fetched() == []


def test_a_cache_that_cannot_be_written_is_told(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "cache").write_bytes(b"")
    assert "the Hub's cache cannot be written: Not a directory: set HF_HOME" in refused()


def test_only_the_configuration_is_fetched_where_no_more_is_needed(hub: Hub) -> None:
    assert held_in(resolve_config(NAME)) == {"config.json": CONFIG}
    assert hub.fetched() == ["config.json"]


def test_a_repository_without_a_configuration_is_told(hub: Hub) -> None:
    hub.repositories[NAME] = Repository({"model.safetensors": WEIGHTS})
    with pytest.raises(SourceError, match=r"has no config\.json"):
        resolve_config(NAME)


def test_bars_show_the_weights_and_not_each_small_file(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TQDM_POSITION", "-1")  # bars though this is no terminal
    enable_progress_bars()
    resolve(NAME, progress=lambda done, total: None)
    shown = capsys.readouterr().err
    assert "model.safetensors" in shown and "json" not in shown


def test_the_weights_that_are_found_are_those_that_were_fetched(hub: Hub) -> None:
    found = shards.find(resolve(NAME))
    assert [file.read_bytes() for file in found.files] == [WEIGHTS]


def test_shards_and_tokenizer_files_of_the_cache_are_no_links_to_elsewhere(hub: Hub) -> None:
    index, names = "model.safetensors.index.json", ["a.safetensors", "b.safetensors"]
    places = json.dumps({"weight_map": dict(zip("xy", names, strict=True))}).encode()
    parts = {name: name.encode() for name in names}
    hub.repositories[NAME] = Repository({**SMALL, index: places, **parts})
    directory = resolve(NAME)
    assert [file.read_bytes() for file in shards.find(directory).files] == list(parts.values())
    assert directory / "spiece.model" in files.tokenizer_files(directory)


def test_code_of_a_repository_is_neither_fetched_nor_run(hub: Hub, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    code = f"open({str(ran)!r}, 'w').close()\n".encode()
    config = {
        "model_type": "llama",
        "auto_map": {"AutoModel": "evil.Model"},
        "model_file": "evil.py",
    }
    hub.repositories[NAME] = Repository(
        {
            **WHOLE,
            "config.json": json.dumps(config).encode(),
            "tokenizer_config.json": b'{"auto_map": {"AutoTokenizer": ["evil.Tokenizer", null]}}',
            "evil.py": code,
            "setup.py": code,
            "__init__.py": code,
        }
    )
    directory = resolve(NAME)
    assert not [file for file in hub.fetched() if file.endswith(".py")]
    with pytest.raises(CheckpointError):
        load_model(directory)
    assert not ran.exists()
