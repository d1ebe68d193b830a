"""Files that are no files, and links that lead away: refused by name, never waited for."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ..support.commands import Run

FIXTURES = Path(__file__).parents[1] / "fixtures"
PLACES = [
    ("t5/umt5-tied", "config.json"),
    ("t5/umt5-tied", "model.safetensors"),
    ("t5-families/byt5", "pytorch_model.bin"),
    ("t5-families/flan-ul2", "model.safetensors.index.json"),
    ("t5-families/flan-ul2", "model-00002-of-00003.safetensors"),
    ("meta/llama2", "params.json"),
    ("meta/llama2", "consolidated.00.pth"),
    ("meta/llama2", "consolidated.01.pth"),
]


def copied(name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))


def check(run: Run, source: Path, out: Path) -> None:
    """Both commands end with one line, or inspect with tables."""
    done = run("convert", "--model", source, "--mlx-path", out)
    assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
    assert not out.exists()
    shown = run("inspect", source)
    assert shown.code == 0 or (shown.code == 2 and shown.err.count("\n") == 1)


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = copied(name, tmp_path)
    (source / place).unlink()
    os.mkfifo(source / place)
    check(run, source, tmp_path / "out")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "name", ["model.gguf", "stories.bin", "x.safetensors", "x.pt", "x.pth", "consolidated.00.pth"]
)
def test_a_pipe_given_by_name_is_not_waited_for(run: Run, tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    for source in (tmp_path / name, tmp_path):
        check(run, source, tmp_path / "out")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["x.safetensors", "model-x.safetensors", "a.gguf", "a.bin"])
def test_a_device_behind_a_link_is_not_read(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for source in (tmp_path / name, tmp_path):
        check(run, source, tmp_path / "out")


SECRET = '{"secret": "of the house"}'


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        ("gguf/llama-f32.gguf", "tokenizer.json"),
        ("gguf/llama-f32.gguf", "tokenizer_config.json"),
        ("gguf/llama-f32.gguf", "chat_template.jinja"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_links_beside_a_single_file_are_not_followed_out(
    run: Run, tmp_path: Path, kind: str, beside: str, whole: bool
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    file = Path(shutil.copy(FIXTURES / kind, source))
    (tmp_path / "secret").write_text(SECRET)
    (source / "tokenizer.json").write_text("{}")
    (source / beside).unlink(missing_ok=True)
    (source / beside).symlink_to(tmp_path / "secret")
    given = source if whole else file
    done = run("convert", "--model", given, "--mlx-path", tmp_path / "out")
    assert done.code == 2 and "link out of its directory" in done.err and beside in done.err


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("meta/llama2", "consolidated.01.pth"),
        ("meta/llama3", "tokenizer.model"),
        ("t5-families/flan-ul2", "model-00002-of-00003.safetensors"),
    ],
)
def test_links_in_a_directory_are_not_followed_out(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = copied(name, tmp_path)
    (source / place).rename(tmp_path / "elsewhere")
    (source / place).symlink_to(tmp_path / "elsewhere")
    done = run("convert", "--model", source, "--mlx-path", tmp_path / "out")
    assert done.code == 2 and "link out of its directory" in done.err and place in done.err


def test_parts_of_a_gguf_are_not_followed_out(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    first = Path(
        shutil.copy(FIXTURES / "gguf" / "llama-f32.gguf", source / "m-00001-of-00002.gguf")
    )
    shutil.copy(first, tmp_path / "elsewhere")
    (source / "m-00002-of-00002.gguf").symlink_to(tmp_path / "elsewhere")
    done = run("convert", "--model", first, "--mlx-path", tmp_path / "out")
    assert done.code == 2 and "link out of its directory" in done.err
