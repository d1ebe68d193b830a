"""Flags that take a size: units, and numbers without one."""

import json
from pathlib import Path

import pytest

from .support import command

FLAGS = (
    ("--memory", "pairs"),
    ("--memory-budget", "batch", "prompts.txt", "-o", "out"),
    ("--memory-budget", "serve", "--model", "no.gguf"),
    ("--prompt-cache-bytes", "serve", "--model", "no.gguf"),
)
"""Each flag that takes a size, after the command that has it and what this command needs."""


@pytest.fixture(autouse=True)
def prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a\n")


@pytest.mark.parametrize("words", FLAGS)
def test_a_number_that_lacks_its_unit_is_asked_about(words: tuple[str, ...]) -> None:
    flag, *rest = words
    command(*rest, flag, "16").refuses(f"{flag}: 16 bytes? write 16GB")
    command(*rest, flag, "1.5").refuses(f"{flag}: 1.5 bytes? write 1.5GB")
    assert [file.name for file in Path().iterdir()] == ["prompts.txt"]


@pytest.mark.parametrize("words", FLAGS)
@pytest.mark.parametrize("size", ["-4GB", "much", "4 GB RAM", "iB", ""])
def test_what_is_no_size_is_quoted_as_it_was_written(words: tuple[str, ...], size: str) -> None:
    flag, *rest = words
    command(*rest, flag, size).refuses(f"{flag}: {size!r} is no size: write 4GB, 500MB or 2GiB")


@pytest.mark.parametrize("words", [one for one in FLAGS if one[0] != "--prompt-cache-bytes"])
def test_nothing_is_no_memory_and_no_file(words: tuple[str, ...]) -> None:
    flag, *rest = words
    command(*rest, flag, "0").refuses(f"{flag} must be more than 0")


@pytest.mark.parametrize(
    ("size", "nbytes"),
    [
        ("32GB", 32 << 30),  # Apple's GB has 1024 MB
        ("32g", 32 << 30),
        ("32 GiB", 32 << 30),
        ("1.5TB", 3 << 39),
        ("65536 mb", 64 << 30),
        ("34359738368", 32 << 30),
        ("34359738368B", 32 << 30),
    ],
)
def test_a_size_has_a_unit_or_is_large_enough_for_bytes(size: str, nbytes: int) -> None:
    shown = json.loads(command("pairs", "--memory", size, "--json").out)
    assert shown["device"] == f"a Mac with {nbytes >> 30} GB"
