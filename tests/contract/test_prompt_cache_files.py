"""Files in the directory of a prompt cache never change a completion or stop a command."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from .support import ROOT, checkpoint, command, moved

PROMPT = "Damaged files are computed anew. " * 12
OTHER = "What another user has written stays. " * 12
"""Prompts of several blocks each."""
TOKENS = 20
FLIPS = 8
"""Runs over files with flipped bits: four with damaged headers, and four with damaged data."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("models")
    target = checkpoint(directory / "target")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None  # without a first token, the prompts share no block
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    return target, moved(target, directory / "draft")


def generate(models: tuple[Path, Path], directory: Path, prompt: str = PROMPT) -> str:
    """Complete a prompt with the cache in a directory."""
    target, draft = models
    drafts = ("--draft-model", draft, "--num-draft", 2)
    flags = ("--model", target, *drafts, "-m", TOKENS, "--prompt-cache-dir", directory)
    done = command("generate", *flags, "--quiet", prompt)
    assert done.code == 0 and done.out, done
    return done.out


@dataclass(frozen=True)
class Cached:
    """A directory in which two prompts are cached.

    first: Names of the files of PROMPT, which are older than those of OTHER.
    plain, other: The completions of both prompts without a cache."""

    directory: Path
    first: list[str]
    plain: str
    other: str


@pytest.fixture(scope="module")
def cached(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Cached:
    directory = tmp_path_factory.mktemp("cache")
    command("generate", "--model", models[0], "-m", 1, "The first command may warn.")
    plain = generate(models, directory)
    names = sorted(file.name for file in directory.iterdir())
    other = generate(models, directory, OTHER)
    assert len(names) >= 4 and {*names} < {file.name for file in directory.iterdir()}
    return Cached(directory, names, plain, other)


def header_size(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


def flip(file: Path, at: int, bit: int) -> None:
    """Flip a bit of a file, and leave its time as it was."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[at] ^= 1 << bit
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def lag_of(content: bytes) -> int:
    """Return the position of the digit of `lag` in a file's header."""
    found = re.search(rb"lag\W+(\d)", content)
    assert found
    return found.start(1)


def test_a_damaged_lag_changes_no_completion_of_another_prompt(
    models: tuple[Path, Path], cached: Cached, tmp_path: Path
) -> None:
    """A lag of 8 for 0 would move the keys and values of all blocks but the first."""
    shutil.copytree(cached.directory, tmp_path / "cache")
    for name in cached.first:
        file = tmp_path / "cache" / name
        flip(file, lag_of(file.read_bytes()), 3)
    assert generate(models, tmp_path / "cache", OTHER) == cached.other
    assert generate(models, tmp_path / "cache") == cached.plain


def test_a_flipped_bit_changes_no_completion(
    models: tuple[Path, Path], cached: Cached, tmp_path: Path
) -> None:
    """Each run flips a bit of every second file, in its header or in its data, and in each file at
    another place."""
    for step in range(FLIPS):
        directory = tmp_path / str(step)
        shutil.copytree(cached.directory, directory)
        damaged = sorted(directory.iterdir())[step % 2 :: 2]
        for number, file in enumerate(damaged):
            content = file.read_bytes()
            size = header_size(content)
            first, end = ((0, size), (size, len(content)))[step // 2 % 2]
            share = (number + step / FLIPS) / len(damaged)
            flip(file, first + int((end - first) * share), (step + number) % 8)
        assert generate(models, directory, OTHER) == cached.other, step
        assert generate(models, directory) == cached.plain, step
        shutil.rmtree(directory)


def with_entry(content: bytes, name: str, value: object) -> bytes:
    """Return a file with another entry in the metadata of its header."""
    size = header_size(content)
    header = json.loads(content[8:size])
    header["__metadata__"][name] = value
    changed = json.dumps(header).encode()
    return len(changed).to_bytes(8, "little") + changed + content[size:]


CHANGED: dict[str, Any] = {
    "model": ["", "target", []],
    "before": ["", "0", 0],
    "tokens": ["", "a", "1.5", "1, 2", f"{1 << 70}", [5]],
    "lag": ["", "a", "8", 0],
    "length": ["", "1", None],
    "snapshot": ["any", True],
    "description": ["[]", {}],
    "digest": ["", None],
}
"""Entry of a header -> other values."""


def test_foreign_files_are_ignored(
    models: tuple[Path, Path], cached: Cached, tmp_path: Path
) -> None:
    """Each file has the name that fits its changed content."""
    shutil.copytree(cached.directory, tmp_path / "cache")
    for file in sorted(cached.directory.iterdir()):
        for entry, values in CHANGED.items():
            for value in values:
                content = with_entry(file.read_bytes(), entry, value)
                name = hashlib.blake2b(content, digest_size=32).hexdigest()
                (tmp_path / "cache" / f"{name}.safetensors").write_bytes(content)
    for _ in range(2):
        assert generate(models, tmp_path / "cache") == cached.plain
    assert {file.name for file in (tmp_path / "cache").iterdir()} >= {
        file.name for file in cached.directory.iterdir()
    }


@pytest.mark.parametrize("part", ["header", "data"])
def test_a_damaged_file_is_named(
    part: str, models: tuple[Path, Path], cached: Cached, tmp_path: Path
) -> None:
    shutil.copytree(cached.directory, tmp_path / "cache")
    files = [tmp_path / "cache" / name for name in cached.first]
    for file in files:
        flip(file, 8 if part == "header" else file.stat().st_size - 1, 1)
    flags = ("--model", models[0], "--draft-model", models[1], "-m", 1, "--quiet")
    flags += ("--prompt-cache-dir", tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-m", "mlx_specdec", "generate", *map(str, flags), PROMPT],
        capture_output=True,
        cwd=ROOT,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if "damaged" in line]
    assert lines and done.returncode == 0, done.stderr
    assert all(any(file.name in line for file in files) for line in lines)


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("bfloat16", ()), ("float16", ()), ("bfloat16", ("--kv-bits", 8, "--kv-group-size", 32))],
    ids=["bfloat16", "float16", "8 bits"],
)
def test_a_cache_on_disk_keeps_every_bit(
    dtype: str, flags: tuple[object, ...], tmp_path: Path
) -> None:
    """A long completion from a cached prompt equals one from a prefilled prompt."""
    target = checkpoint(tmp_path / "target", hidden_size=128, head_dim=32)
    weights = mx.load(str(target / "model.safetensors"))
    cast = {name: array.astype(getattr(mx, dtype)) for name, array in weights.items()}
    mx.save_safetensors(str(target / "model.safetensors"), cast, {"format": "mlx"})
    flags = ("--model", target, "-m", 40, "--quiet", *flags)
    cache = ("--prompt-cache-dir", tmp_path / "cache")
    plain = command("generate", *flags, PROMPT)
    assert plain.code == 0 and plain.out, plain.err
    for _ in range(2):
        assert command("generate", *flags, *cache, PROMPT).out == plain.out
