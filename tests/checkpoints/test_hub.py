"""Downloads from a Hub that is a real server on loopback, through the real huggingface_hub."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_specdec.checkpoints.hub import choose
from mlx_specdec.checkpoints.source import _of_page, resolve
from mlx_specdec.conversion.inspect import inspect
from mlx_specdec.errors import CheckpointError, SourceError
from mlx_specdec.measure.estimate import side
from mlx_specdec.models.number_format import NumberFormat

from ..support.checkpoints import T5, refusal, save, t5_weights, write_index, write_t5
from ..support.hub_server import NAME, Hub

LIST = f"/api/models/{NAME}"
CONFIG = b'{"model_type": "t5"}'
WEIGHTS = bytes(range(256)) * 40
SMALL = {"config.json": CONFIG, "tokenizer.json": b"{}", "spiece.model": b"pieces"}
WHOLE = {**SMALL, "model.safetensors": WEIGHTS}
INDEX = "model.safetensors.index.json"
FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture
def hub(hub: Hub) -> Hub:
    """The same Hub with one model."""
    hub.files = WHOLE
    return hub


@pytest.mark.parametrize(
    ("address", "revision"),
    [
        (f"https://huggingface.co/{NAME}", None),
        (f"http://www.huggingface.co/{NAME}/", None),
        (f"https://hf.co/{NAME}?library=mlx", None),
        (f"https://huggingface.co/{NAME}/tree/v2", "v2"),
    ],
)
def test_the_address_of_a_page_is_the_name_of_its_repository(
    address: str, revision: str | None
) -> None:
    assert _of_page(address, None) == (NAME, revision)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def refused(name: str = NAME, **options: Any) -> str:
    """The one sentence that the user reads."""
    text = refusal((SourceError, CheckpointError), resolve, name, **options)
    assert "http" not in text.replace("huggingface.co", "")
    return text


def held_in(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def sent(hub: Hub) -> set[str]:
    """The files that were requested of the server."""
    return {path.rpartition("/")[2] for path, *_ in hub.requests if not path.startswith("/api")}


def arrived(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").glob("models*/snapshots/*/*")}


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["consolidated.safetensors", "model.safetensors"], ["model.safetensors"]),
        (["only.Q4_0.gguf"], ["only.Q4_0.gguf"]),
        (["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"], None),
        (["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None),
        (["medusa_lm_head.pt", "medusa_lm_head.safetensors"], ["medusa_lm_head.safetensors"]),
        (["model.safetensors", "mtp.safetensors"], None),
    ],
)
def test_only_the_first_format_that_can_be_read_is_chosen_and_never_code(
    weights: list[str], wanted: list[str] | None
) -> None:
    refused_files = (
        "tf_model.h5 flax_model.msgpack flax_model.msgpack.index.json model.onnx README.md "
    )
    refused_files += (
        "onnx/decoder.onnx original/consolidated.00.pth rust_model.ot modeling.py .hidden.json "
    )
    refused_files += "../up.json /tmp/root.json ..\\up.json a\n.json"
    small, index, chosen = choose(NAME, [*SMALL, *refused_files.split(" "), *weights])
    assert chosen == (weights if wanted is None else wanted)
    assert index is None and set(small) == set(SMALL)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["config.json"], "no weights that are read here"),
        ([], "no weights that are read here"),
        (["a.Q4_0.gguf", "a.Q8_0.gguf"], "hf download some/model a.Q4_0.gguf"),
    ],
)
def test_a_repository_without_one_model_says_so(names: list[str], says: str) -> None:
    with pytest.raises(SourceError, match=says):
        choose(NAME, names)


def test_a_model_arrives_whole_and_is_not_fetched_again(hub: Hub) -> None:
    hub.files = {**WHOLE, "pytorch_model.bin": b"no", "modeling.py": b"no", "tf_model.h5": b"no"}
    directory = resolve(f"https://huggingface.co/{NAME}")
    assert held_in(directory) == WHOLE
    hub.requests.clear()
    assert resolve(NAME) == directory
    assert [path for path, *_ in hub.requests] == [f"{LIST}/revision/main?blobs=true"]


def test_an_index_that_names_a_missing_file_is_refused_before_weights_are_fetched(hub: Hub) -> None:
    places = json.dumps({"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}).encode()
    hub.files = {**SMALL, INDEX: places, "m.safetensors": WEIGHTS}
    assert "lacks n.safetensors" in refused()
    assert sent(hub) == {INDEX}


def test_an_interrupted_download_goes_on_where_it_was_at_the_next_start(hub: Hub) -> None:
    def stop(done: int, total: int) -> None:
        if done > 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve(NAME, progress=stop)
    hub.requests.clear()
    steps: list[tuple[int, int]] = []
    assert held_in(resolve(NAME, progress=lambda *step: steps.append(step))) == WHOLE
    assert sent(hub) == {"model.safetensors"}
    begin = int(hub.requests[-1][1].removeprefix("bytes=").removesuffix("-"))
    assert begin >= 4000 and steps[0] == (begin, len(WEIGHTS)) and steps[-1][0] == len(WEIGHTS)


def test_progress_is_in_bytes_of_all_that_is_missing_and_nothing_is_printed(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    steps: list[tuple[int, int]] = []
    resolve(NAME, progress=lambda *step: steps.append(step))
    total = sum(map(len, WHOLE.values()))
    assert {step[1] for step in steps} == {total} and steps[-1] == (total, total)
    assert len(steps) > 10 and steps == sorted(steps)
    assert capsys.readouterr() == ("", "")
    resolve(NAME, progress=lambda *step: 1 / 0)


def test_what_is_not_what_the_list_promised_is_removed(hub: Hub, tmp_path: Path) -> None:
    hub.altered = {"model.safetensors": bytes(len(WEIGHTS))}
    assert "model.safetensors of some/model arrived damaged" in refused()
    assert "model.safetensors" not in arrived(tmp_path)
    hub.altered.clear()
    assert held_in(resolve(NAME)) == WHOLE


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"{}"])
def test_what_is_no_hub_is_reported(page: bytes, hub: Hub) -> None:
    hub.page = page
    assert "what answers is no Hub" in refused()


@pytest.mark.parametrize(
    ("start", "status", "code", "says"),
    [
        (LIST, 401, "RepoNotFound", "run `hf auth login` if it is private"),
        (LIST, 404, "RepoNotFound", "is neither a directory here nor a repository"),
        (f"/{NAME}", 403, "GatedRepo", "accept its terms on huggingface.co/some/model"),
        (f"/{NAME}", 403, "", "answers 403: .*check what your token may read"),
        (LIST, 429, "", "answers 429: try again"),
        ("/cdn", 500, "", "model.safetensors of some/model cannot be downloaded"),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_and_leaves_no_weights(
    start: str, status: int, code: str, says: str, hub: Hub, tmp_path: Path
) -> None:
    hub.refused = {start: (status, code)}
    assert re.search(says, refused())
    assert "model.safetensors" not in arrived(tmp_path)
    hub.refused.clear()
    directory = resolve(NAME)
    assert held_in(directory) == WHOLE
    hub.refused = {"/": (status, code)}
    assert resolve(NAME) == directory


def test_names_and_revisions_that_are_not_there_are_reported(hub: Hub) -> None:
    resolve(NAME)
    assert "no/such is neither a directory here nor a repository" in refused("no/such")
    assert "cannot be a name on the Hub" in refused("a" * 120)
    assert "has no revision v9: check --revision" in refused(revision="v9")


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "2" * 40])
def test_a_revision_is_fetched_as_it_was_and_known_offline_by_its_name(
    revision: str, hub: Hub, offline: Callable[[], None]
) -> None:
    hub.commit, hub.revisions = "2" * 40, ("main", "v1.0", "refs/pr/1")
    directory = resolve(NAME, revision=revision)
    assert held_in(directory) == WHOLE and directory.name == "2" * 40
    offline()
    assert resolve(NAME, revision=revision) == directory


def test_without_a_network_the_cache_serves_and_nobody_is_sent_to_log_in(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = resolve(NAME)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve(NAME) == directory
    shutil.rmtree(constants.HF_HUB_CACHE)
    text = refused()
    assert "the Hub cannot be reached" in text and "login" not in text


def test_a_part_of_a_model_in_the_cache_does_not_serve(
    hub: Hub, offline: Callable[[], None]
) -> None:
    directory = resolve(NAME)
    (directory / "model.safetensors").unlink()
    offline()
    text = refused()
    assert "holds only a part of some/model" in text and "HF_HUB_OFFLINE" in text


def test_a_disk_without_room_is_named_before_weights_are_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5000))
    assert "make room" in refused() and sent(hub) == set()


def test_only_the_hub_is_shown_the_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.cuts = [500]
    resolve(NAME)
    shown = {(path.startswith("/cdn/"), token) for path, _, token in hub.requests}
    assert shown == {(False, "Bearer hf_secret"), (True, "")}


@pytest.mark.parametrize("own_head", [True, False])
@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_model_to_look_at_headers_alone_are_fetched(
    hub: Hub, tmp_path: Path, own_head: bool, sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_specdec.checkpoints.hub.GUESS", 200)
    monkeypatch.setattr("mlx_specdec.checkpoints.hub.PIECE", 64)
    weights = t5_weights({**T5, "d_ff": 4096}, own_head=own_head)
    if not own_head:
        weights["lm_head.weight"] = weights["shared.weight"] + 0
    local = write_t5(tmp_path / "t5", {"d_ff": 4096}, weights=weights)
    if sharded:
        (local / "model.safetensors").unlink()
        names = sorted(weights)
        parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
        for file, part in parts.items():
            save(local / file, {name: weights[name] for name in part})
        write_index(local, {name: file for file, part in parts.items() for name in part})
    hub.files = held_in(local)
    found, expected = inspect(NAME), inspect(str(local))
    assert str(found.path) == NAME and found.problem == ""
    assert replace(found, path=local) == expected
    assert ("lm_head.weight" in found.tensor_report.tied) is not own_head
    assert side(NAME, None, NumberFormat(), 9) == replace(
        side(str(local), None, NumberFormat(), 9), name=NAME
    )
    assert hub.sent < 20_000 < sum(len(data) for data in hub.files.values()) / 100
    assert not any(name.endswith(".safetensors") for name in arrived(tmp_path))


def test_what_is_in_the_cache_and_what_has_no_header_is_looked_at_as_a_whole(
    hub: Hub, tmp_path: Path, offline: Callable[[], None]
) -> None:
    hub.files = held_in(write_t5(tmp_path / "t5"))
    resolve(NAME)
    sent = hub.sent
    inspection = inspect(NAME)
    assert hub.sent == sent and inspection.parameters > 0
    offline()
    assert inspect(NAME) == inspection
    torch = FIXTURES / "torch" / "llama"
    constants.HF_HUB_OFFLINE = False
    hub.commit, hub.files = "2" * 40, held_in(torch)
    whole = hub.files
    hub.files = {file: data for file, data in whole.items() if file != "model.safetensors"}
    with pytest.raises(SourceError, match="no safetensors files, whose headers alone"):
        side(NAME, None, NumberFormat(), 9)
    hub.files = whole
    assert replace(inspect(NAME), path=torch) == inspect(str(torch))


def test_a_hub_without_parts_and_a_damaged_header_are_one_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlx_specdec.checkpoints.hub.GUESS", 200)
    hub.files, hub.ranges = held_in(write_t5(tmp_path / "t5")), False
    with pytest.raises(SourceError, match="no parts of files: download"):
        inspect(NAME)
    hub.ranges = True
    for damaged in (b"", b"1234", hub.files["model.safetensors"][:300]):
        hub.files = {**hub.files, "model.safetensors": damaged}
        with pytest.raises(CheckpointError, match=f"^{NAME}/model.safetensors is truncated"):
            inspect(NAME)
    with pytest.raises(SourceError, match="neither a directory here nor a repository"):
        inspect("some/other")
    with pytest.raises(SourceError, match="no revision nowhere"):
        inspect(NAME, revision="nowhere")
