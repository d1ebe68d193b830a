"""Sources that cannot be read as they are: one line says what they are and what to do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..support.commands import Run

FIXTURES = Path(__file__).parents[1] / "fixtures"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"1" * 64 + b"\nsize 9\n"
NOBODY = 65534


def each_command(run: Run, source: Path, out: Path) -> Iterator[str]:
    """What generate, convert and inspect say, one line each."""
    for command in (("generate", "--model", source, "x"), ("inspect", source)):
        done = run(*command)
        assert done.code == 2 and done.err.startswith("error: ") and done.err.count("\n") == 1
        yield done.err
    done = run("convert", "--model", source, "--mlx-path", out)
    assert done.code == 2 and done.err.count("\n") == 1 and not out.exists()
    yield done.err


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("t5/umt5-tied", "model.safetensors"),
        ("t5-families/byt5", "pytorch_model.bin"),
        ("meta/llama2", "consolidated.00.pth"),
    ],
)
def test_a_pointer_of_git_lfs_is_called_one(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))
    (source / place).write_bytes(POINTER)
    for said in each_command(run, source, tmp_path / "out"):
        assert f"{place} is a pointer of Git LFS" in said and "git lfs pull" in said


def test_a_pointer_in_place_of_a_gguf_is_called_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(POINTER)
    for said in each_command(run, tmp_path / "m.gguf", tmp_path / "out"):
        assert "git lfs pull" in said


@pytest.mark.parametrize("name", ["t5/umt5-tied", "meta/llama3"])
def test_a_byte_order_mark_before_a_configuration_is_passed_over(
    run: Run, tmp_path: Path, name: str
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    assert run("convert", "--model", FIXTURES / name, "--mlx-path", source).code == 0
    config = (source / "config.json").read_bytes()
    (source / "config.json").write_bytes(b"\xef\xbb\xbf" + config)
    assert run("convert", "--model", source, "--mlx-path", out).code == 0
    assert (out / "config.json").read_bytes()[:1] == b"{"
    if (source / "tokenizer.json").is_file():
        command = ("generate", "x", "--max-tokens", "3", "--temp", "0", "--model")
        marked, plain = run(*command, source), run(*command, out)
        assert marked.code == 0 and marked.out == plain.out


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("t5/umt5-tied", "tokenizer.json"),
        ("t5/umt5-tied", "spiece.model"),
        ("meta/llama3", "tokenizer.model"),
    ],
)
def test_a_pointer_in_place_of_a_tokenizer_is_called_one(
    run: Run, tmp_path: Path, name: str, place: str
) -> None:
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "source"))
    (source / place).write_bytes(POINTER)
    convert = ("convert", "--model", source, "--mlx-path", tmp_path / "out")
    for command in (("generate", "--model", source, "x"), convert):
        done = run(*command)
        assert done.code == 2 and done.err.count("\n") == 1
        assert f"{place} is a pointer of Git LFS" in done.err and not (tmp_path / "out").exists()


@pytest.fixture
def closed() -> Iterator[Path]:
    """A model in a directory without permissions, in one that everybody may enter."""
    outer = Path(tempfile.mkdtemp())
    outer.chmod(0o755)
    source = Path(shutil.copytree(FIXTURES / "t5" / "umt5-tied", outer / "source"))
    try:
        yield source
    finally:
        source.chmod(0o755)
        shutil.rmtree(outer)


@pytest.mark.parametrize("mode", [0o000, 0o600, 0o300])
def test_a_directory_without_permission_is_one_line(run: Run, closed: Path, mode: int) -> None:
    for _ in each_command(run, closed / "none", closed.parent / "out"):
        pass  # what is imported late is imported now, while that may be read
    closed.chmod(mode)
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        for said in each_command(run, closed, closed.parent / "out"):
            assert f"{closed} may not be read" in said
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    "arguments", [["generate", "x"], ["convert", "--model", "x"], ["inspect", "x"]]
)
def test_a_working_directory_that_was_deleted_is_one_line(
    tmp_path: Path, arguments: list[str]
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    script = (
        f"cd {here} && rmdir {here} && exec {sys.executable} -m mlx_specdec {' '.join(arguments)}"
    )
    done = subprocess.run(
        ["sh", "-c", script],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: the working directory has been deleted: change to another one\n"
