"""Layers for multi-token prediction that are fetched alone, from a Hub on loopback."""

import json
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from mlx_specdec import Options, SourceError, generate, load

from ..support import mtp
from ..support.checkpoints import write_index
from ..support.hub_server import NAME, Hub, asked
from ..support.tokenizers import byte_level
from .support import command

FILE = "mtp.safetensors"
SIZE = 400
CARD = f"---\nlibrary_name: mlx\nbase_model: {NAME}\n---\n# A conversion\n"
COPY = "model.layers.2.shared_head.head.weight"


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    with asked(Hub(), tmp_path) as hub:
        yield hub


def kept() -> list[Path]:
    """Return the files of layers that were fetched."""
    return [*Path(os.environ["MLX_SPECDEC_CACHE"]).rglob(FILE)]


def original(directory: Path, family: str = "qwen3_5", **settings: Any) -> Path:
    """The model of the makers, in two files with an index."""
    mtp.write(family, directory, vocabulary=SIZE, **settings)
    weights = dict(mx.load(str(directory / "model.safetensors")))  # type: ignore[arg-type]
    (directory / "model.safetensors").unlink()
    names = list(weights)
    places = {}
    # The layers are in both files.
    for number in (1, 2):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: weights[name] for name in names[number - 1 :: 2]}
        arrays = {name: np.array(array) for name, array in part.items()}
        save_file(arrays, directory / file, {"format": "pt"})  # in the order of the names
        places.update(dict.fromkeys(part, file))
    write_index(directory, places)
    return directory


def converted(directory: Path, family: str = "qwen3_5", card: str = CARD) -> Path:
    """The same model without its layers, as mlx-lm converts it."""
    byte_level(mtp.write(family, directory, vocabulary=SIZE, original=False, layer=False))
    (directory / "README.md").write_text(card, encoding="utf-8")
    return directory


def publish(hub: Hub, directory: Path) -> None:
    hub.files = {file.name: file.read_bytes() for file in directory.iterdir()}


def headers_and_layers(directory: Path, prefix: str, left_out: str = "") -> int:
    """The bytes of the headers of both files, and of the layers' tensors."""
    total = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            [length] = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(length))
        total += 8 + length
        for name, entry in header.items():
            if name.startswith(prefix) and name != left_out:
                begin, end = entry["data_offsets"]
                total += end - begin
    return total


@pytest.mark.parametrize(
    ("family", "prefix", "runs"), [("qwen3_5", "mtp.", 2), ("glm4_moe", "model.layers.2.", 3)]
)
def test_headers_and_the_layers_are_all_that_is_fetched(
    family: str, prefix: str, runs: int, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = mtp.CONFIGS[family].get("hidden_size", 32)
    extra = {COPY: mx.zeros((SIZE, width))} if family == "glm4_moe" else None
    source = original(tmp_path / "source", family, extra=extra)
    publish(hub, source)
    target = converted(tmp_path / "target", family)
    lines, reports = list[str](), list[tuple[int, int]]()

    def fetch(name: str) -> Any:
        report = lambda *done: reports.append(done)  # noqa: E731
        return load(target, name, announce=lines.append, progress=report)

    pair = fetch("mtp")
    expected = headers_and_layers(source, prefix, COPY)
    assert hub.sent == expected
    size = expected - headers_and_layers(source, "-")
    assert reports[-1] == (size, size) and sorted(reports) == reports
    [line] = lines
    assert NAME in line and f"{size / 1000:.1f} kB" in line
    # Two requests for each header. Tensors that lie side by side share one.
    assert sum(path.startswith("/cdn/") for path, *_ in hub.requests) == 4 + runs
    [file] = kept()
    written = dict(mx.load(str(file)))  # type: ignore[arg-type]
    wanted = {
        name: array
        for file in source.glob("*.safetensors")
        for name, array in dict(mx.load(str(file))).items()  # type: ignore[arg-type]
        if name.startswith(prefix) and name != COPY
    }
    assert written.keys() == wanted.keys()
    assert all(mx.array_equal(written[name], array) for name, array in wanted.items())
    plain = generate(pair, "some text", Options(max_tokens=8, regular=True))
    drafted = generate(pair, "some text", Options(max_tokens=8, num_draft=2, proposer="mtp"))
    assert drafted.tokens == plain.tokens and drafted.stats.drafted
    # The second time needs no network, also under the name of the repository.
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in ("mtp", f"mtp:{NAME}"):
        fetch(name)
    assert hub.sent == expected and kept() == [file]


def test_a_target_that_has_the_layers_fetches_nothing(hub: Hub, tmp_path: Path) -> None:
    target = byte_level(mtp.write("qwen3_5", tmp_path / "target", vocabulary=SIZE))
    options = Options(max_tokens=4, num_draft=2, proposer="mtp")
    assert generate(load(target, "mtp"), "some text", options).stats.drafted
    assert not hub.requests


def test_a_broken_connection_is_resumed_and_a_dead_one_leaves_nothing(
    hub: Hub, tmp_path: Path
) -> None:
    source, target = original(tmp_path / "source"), converted(tmp_path / "target")
    publish(hub, source)
    complete = [10**9] * 4
    hub.cuts = [*complete, 5, 0, 3, *[0] * 6]
    with pytest.raises(SourceError, match="was cut") as caught:
        load(target, "mtp")
    assert "\n" not in str(caught.value) and not kept()
    hub.cuts = [*complete, 5, 0, 1000]
    load(target, "mtp")
    name = "mtp.fc.weight"
    [file] = [file for file in source.glob("*.safetensors") if name in mx.load(str(file))]
    [written] = kept()
    one, two = (dict(mx.load(str(place))) for place in (written, file))  # type: ignore[arg-type]
    assert mx.array_equal(one[name], two[name])


@pytest.mark.parametrize(
    ("config", "card", "expected"),
    [
        ({}, CARD, NAME),
        ({}, f"---\nbase_model:\n- {NAME}\n---\n", NAME),
        ({"_name_or_path": NAME}, "---\nlicense: mit\n---\n", NAME),
        ({"_name_or_path": NAME}, "no front matter", NAME),
        ({"_name_or_path": NAME}, "---\n: [\n---\n", NAME),
        ({"_name_or_path": "/home/me/model"}, "---\nbase_model: 5\n---\n", None),
    ],
)
def test_the_original_is_what_the_card_or_config_json_names(
    config: dict[str, str], card: str, expected: str | None, hub: Hub, tmp_path: Path
) -> None:
    target = converted(tmp_path / "target", card=card)
    stated = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**stated, **config}))
    hub.files = {"README.md": b""}
    with pytest.raises(SourceError) as caught:
        load(target, "mtp")
    if expected is None:
        assert "--draft-model mtp:OWNER/NAME" in str(caught.value) and not hub.requests
    else:
        assert f"{NAME} has no config.json" in str(caught.value)


def test_the_card_of_a_target_on_the_hub_is_read_there(hub: Hub, tmp_path: Path) -> None:
    card = "---\nbase_model: other/model\n---\n"
    publish(hub, converted(tmp_path / "target", card=card))
    with pytest.raises(SourceError, match="other/model is neither"):
        load(NAME, "mtp")


@pytest.mark.parametrize(
    ("prepare", "part"),
    [
        (lambda hub, source: setattr(constants, "HF_HUB_OFFLINE", True), "HF_HUB_OFFLINE forbids"),
        (lambda hub, source: hub.refused.update({"/api": (404, "RepoNotFound")}), "neither a"),
        (lambda hub, source: publish(hub, original(source, layer=False)), "has no layers for"),
        (lambda hub, source: publish(hub, original(source, "glm4_moe", layer=False)), "has no lay"),
        (lambda hub, source: hub.files.update({"README.md": b""}), "has no config.json"),
        (lambda hub, source: setattr(hub, "ranges", False), "no parts of files"),
        (lambda hub, source: hub.files.pop("model-00002-of-00002.safetensors"), "its index names"),
    ],
)
def test_what_cannot_be_fetched_is_said_in_one_line_with_exit_code_2(
    prepare: Callable[[Hub, Path], object],
    part: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    if part in ("no parts of files", "its index names"):
        publish(hub, original(tmp_path / "whole"))
    hub.files = dict(hub.files)
    prepare(hub, tmp_path / "source")
    target = converted(tmp_path / "target")
    command("generate", "--model", target, "--draft-model", "mtp", "some text").refuses(part)
