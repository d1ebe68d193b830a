"""Downloads from a Hub that is a real server on loopback, through the real huggingface_hub."""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from mlx_specdec import CheckpointError, SourceError, convert, load

from ..support.checkpoints import T5, save, t5_weights, write_index, write_t5
from ..support.hub_server import NAME, Hub, asked
from .converted import provenance
from .scores import letters
from .support import ROOT, command

LIST = f"/api/models/{NAME}"
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"


def held_in(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small model."""
    directory = write_t5(tmp_path_factory.mktemp("t5"), {"d_ff": 8}, tokenizer=False)
    return held_in(letters(directory, 64))


@pytest.fixture
def hub(whole: dict[str, bytes], tmp_path: Path) -> Iterator[Hub]:
    with asked(Hub(whole), tmp_path) as hub:
        yield hub


def converted(tmp_path: Path, name: str = NAME, **options: Any) -> dict[str, bytes]:
    """Convert a model of the Hub, and return the files of its snapshot in the cache."""
    convert(name, tmp_path / "out", overwrite=True, **options)
    commit = provenance(tmp_path / "out")["source"]["revision"]
    return held_in(tmp_path / "cache" / "models--some--model" / "snapshots" / commit)


def downloads(steps: list[tuple[int, int]]) -> Callable[[str, int, int], None]:
    """Return a callback for progress that keeps the steps of a download."""
    return lambda step, *done: steps.append(done) if step == "downloading" else None


def refused(tmp_path: Path, name: str = NAME, **options: Any) -> str:
    """Return the one sentence that the user reads, after which there is no result."""
    with pytest.raises((SourceError, CheckpointError)) as caught:
        convert(name, tmp_path / "no", **options)
    text = str(caught.value)
    assert "\n" not in text and "http" not in text.replace("huggingface.co", "")
    assert not (tmp_path / "no").exists()
    return text


def sent(hub: Hub) -> set[str]:
    """The files that were requested of the server."""
    return {path.rpartition("/")[2] for path, *_ in hub.requests if not path.startswith("/api")}


def arrived(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "cache").glob("models*/snapshots/*/*")}


NEVER = (
    "tf_model.h5 flax_model.msgpack flax_model.msgpack.index.json model.onnx onnx/decoder.onnx "
    "original/consolidated.00.pth rust_model.ot modeling.py .hidden.json ../up.json /tmp/root.json "
    "..\\up.json consolidated.safetensors pytorch_model.bin model.Q4_0.gguf"
)


def test_only_the_first_format_is_fetched_and_never_code(
    hub: Hub, whole: dict[str, bytes], tmp_path: Path
) -> None:
    hub.files = {**whole, **dict.fromkeys(NEVER.split(" "), b"no"), "a\n.json": b"no"}
    steps: list[tuple[int, int]] = []
    found = converted(tmp_path, progress=downloads(steps))
    assert found == whole
    total = sum(map(len, whole.values()))
    assert {step[1] for step in steps} == {total} and steps[-1] == (total, total)
    assert len(steps) > 10 and steps == sorted(steps)
    # The second time, nothing but the list is requested, also under the address of a page.
    hub.requests.clear()
    steps.clear()
    for name in (NAME, f"https://huggingface.co/{NAME}", f"https://hf.co/{NAME}?library=mlx"):
        assert converted(tmp_path, name, progress=downloads(steps)) == whole
    assert not steps
    assert [path for path, *_ in hub.requests] == [f"{LIST}/revision/main?blobs=true"] * 3


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        ("model.safetensors pytorch_model.bin", "model.safetensors"),
        ("pytorch_model.bin model.fp16.onnx", "pytorch_model.bin"),
        ("consolidated.safetensors model.safetensors", "model.safetensors"),
        ("only.Q4_0.gguf model.onnx", "only.Q4_0.gguf"),
        ("m-00001-of-00002.gguf m-00002-of-00002.gguf", ""),
        ("model-00001-of-00002.safetensors model-00002-of-00002.safetensors", ""),
        ("medusa_lm_head.pt medusa_lm_head.safetensors", "medusa_lm_head.safetensors"),
        ("model.safetensors mtp.safetensors", ""),
        ("", "holds no weights that are read here"),
        ("a.Q4_0.gguf a.Q8_0.gguf", "hf download some/model a.Q4_0.gguf"),
    ],
)
def test_which_weights_are_fetched(hub: Hub, tmp_path: Path, weights: str, wanted: str) -> None:
    """The files have other contents than weights, which is noticed after the download."""
    hub.files = {**dict.fromkeys(weights.split(), b"other"), "config.json": b'{"model_type": "t5"}'}
    text = refused(tmp_path)
    if " " in wanted:
        assert wanted in text and not arrived(tmp_path)
    else:
        assert arrived(tmp_path) == {"config.json", *(wanted or weights).split()}


def test_an_index_that_names_a_missing_file_is_refused_before_weights_are_fetched(
    hub: Hub, tmp_path: Path
) -> None:
    places = json.dumps({"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}).encode()
    hub.files = {"config.json": b"{}", INDEX: places, "m.safetensors": b"12345"}
    assert "lacks n.safetensors" in refused(tmp_path)
    assert sent(hub) == {INDEX}


def test_an_interrupted_download_goes_on_at_the_next_start(
    hub: Hub, whole: dict[str, bytes], tmp_path: Path
) -> None:
    def stop(step: str, done: int, total: int) -> None:
        if total - done < len(whole[WEIGHTS]) - 5000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(NAME, tmp_path / "out", progress=stop)
    assert not (tmp_path / "out").exists() and WEIGHTS not in arrived(tmp_path)
    hub.requests.clear()
    steps: list[tuple[int, int]] = []
    found = converted(tmp_path, progress=downloads(steps))
    assert found == whole and sent(hub) == {WEIGHTS}
    begin = int(hub.requests[-1][1].removeprefix("bytes=").removesuffix("-"))
    size = len(whole[WEIGHTS])
    assert begin >= 4000 and steps[0] == (begin, size) and steps[-1][0] == size


def test_what_is_not_what_the_list_promised_is_removed(
    hub: Hub, whole: dict[str, bytes], tmp_path: Path
) -> None:
    hub.altered = {WEIGHTS: bytes(len(whole[WEIGHTS]))}
    assert "model.safetensors of some/model arrived damaged" in refused(tmp_path)
    assert WEIGHTS not in arrived(tmp_path)
    hub.altered.clear()
    assert converted(tmp_path) == whole


@pytest.mark.parametrize("page", [b"<html>please log in</html>", b"{}"])
def test_what_is_no_hub_is_reported(page: bytes, hub: Hub, tmp_path: Path) -> None:
    hub.page = page
    assert "what answers is no Hub" in refused(tmp_path)


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
    start: str,
    status: int,
    code: str,
    says: str,
    hub: Hub,
    whole: dict[str, bytes],
    tmp_path: Path,
) -> None:
    hub.refused = {start: (status, code)}
    assert re.search(says, refused(tmp_path))
    assert WEIGHTS not in arrived(tmp_path)
    hub.refused.clear()
    assert converted(tmp_path) == whole
    hub.refused = {"/": (status, code)}
    assert converted(tmp_path) == whole


@pytest.mark.parametrize("revision", ["v1.0", "refs/pr/1", "2" * 40])
def test_a_revision_is_fetched_as_it_was_and_known_offline_by_its_name(
    revision: str, hub: Hub, whole: dict[str, bytes], tmp_path: Path, monkeypatch: Any
) -> None:
    hub.commit, hub.revisions = "2" * 40, ("main", "v1.0", "refs/pr/1")
    assert converted(tmp_path, revision=revision) == whole
    source = provenance(tmp_path / "out")["source"]
    assert (source["name"], source["revision"]) == (NAME, "2" * 40)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert converted(tmp_path, revision=revision) == whole
    pages = {"v1.0": f"https://huggingface.co/{NAME}/tree/v1.0"}
    if page := pages.get(revision):
        assert converted(tmp_path, page) == whole


def test_without_a_network_the_cache_serves_and_nobody_is_sent_to_log_in(
    hub: Hub, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    converted(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert converted(tmp_path) == whole
    assert load(NAME).name == NAME
    [weights] = (tmp_path / "cache").glob(f"models*/snapshots/*/{WEIGHTS}")
    weights.unlink()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refused(tmp_path)
    assert "holds only a part of some/model" in text and "HF_HUB_OFFLINE" in text
    shutil.rmtree(tmp_path / "cache")
    assert "HF_HUB_OFFLINE" in refused(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    text = refused(tmp_path)
    assert "the Hub cannot be reached" in text and "login" not in text


def test_only_the_hub_is_shown_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.cuts = [500]
    converted(tmp_path)
    shown = {(path.startswith("/cdn/"), token) for path, _, token in hub.requests}
    assert shown == {(False, "Bearer hf_secret"), (True, "")}


# Models to look at


def shown(*arguments: object) -> Any:
    done = command(*arguments, "--json")
    assert done.code == 0, done.err
    return json.loads(done.out)


@pytest.mark.parametrize(("own_head", "sharded"), [(True, False), (False, True)])
def test_of_a_model_to_look_at_headers_alone_are_fetched(
    hub: Hub, tmp_path: Path, own_head: bool, sharded: bool
) -> None:
    changes = {"d_ff": 1 << 14}
    weights = t5_weights({**T5, **changes}, own_head=own_head)
    if not own_head:
        weights["lm_head.weight"] = weights["shared.weight"] + 0
    local = write_t5(tmp_path / "t5", changes, weights=weights)
    if sharded:
        (local / WEIGHTS).unlink()
        names = sorted(weights)
        parts = {f"model-0000{n + 1}-of-00002.safetensors": names[n::2] for n in range(2)}
        for file, part in parts.items():
            save(local / file, {name: weights[name] for name in part})
        write_index(local, {name: file for file, part in parts.items() for name in part})
    hub.files = held_in(local)
    found, expected = shown("inspect", NAME), shown("inspect", local)
    assert {**found, "path": expected["path"]} == expected and found["path"] == NAME
    assert ("lm_head.weight" in found["tied"]) is not own_head
    arguments = ("--draft-model", ROOT / "weights" / "t5-enfr-draft", "--model")
    found, expected = (
        json.dumps(shown("estimate", *arguments, name)).replace(str(name), "")
        for name in (NAME, local)
    )
    assert found == expected
    assert hub.sent < sum(len(data) for data in hub.files.values()) / 10
    assert not any(name.endswith(".safetensors") for name in arrived(tmp_path))
