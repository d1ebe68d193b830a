"""The prompts that shipped Medusa heads are trained on: beginnings, never held-out files."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import make_head_prompts
from demo_training.texts import PREFIX, library_files, split

SOURCE = '''
class Shelf:
    """Holds things."""

    def count(self):
        """How many.

        Empty ones as well.
        """
        return len(self)

def add(a, b):
    return a + b

def short(): return 1
'''


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    output = tmp_path / "prompts.jsonl"
    given = ["make_head_prompts.py", *flags, "--output", str(output)]
    monkeypatch.setattr(sys, "argv", given)
    make_head_prompts.main()
    return [json.loads(line)["prompt"] for line in output.read_text().splitlines()]


def test_a_function_begins_with_its_head_and_docstring_alone() -> None:
    assert list(make_head_prompts.function_beginnings(SOURCE)) == [
        "def add(a, b):\n",
        'def count(self):\n    """How many.\n\n    Empty ones as well.\n    """\n',
    ]


def test_python_prompts_come_from_one_side_of_the_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(8):
        text = "\n".join(f"def f{number}_{part}(x):\n    return x\n" for part in range(40))
        (library / f"m{number}.py").write_text(text)
    learned, held_out = split(library_files(library))
    for flags, files in (((), learned), (("--held-out",), held_out)):
        prompts = made(tmp_path, monkeypatch, "python", "--library", str(library), *flags)
        allowed = "\n".join(file.read_text() for file in files)
        assert prompts
        assert len(set(prompts)) == len(prompts)
        assert all(prompt.rstrip("\n") in allowed for prompt in prompts)


def test_translation_prompts_are_sentences_behind_the_models_prefix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"I see {n} dogs.\tJe vois {n} chiens.\n" for n in range(2, 90)))
    flags = ("translation", "--data", str(data), "--count", "20")
    prompts = made(tmp_path, monkeypatch, *flags)
    assert len(prompts) == 20
    assert all(prompt.startswith(PREFIX) for prompt in prompts)
    assert "Je vois" not in "".join(prompts)
    assert made(tmp_path, monkeypatch, *flags) == prompts


def test_bits_of_a_file_are_a_few_lines() -> None:
    source = "\n".join(f"line {number}" for number in range(600))
    bits = list(make_head_prompts.file_bits(source, random.Random(0)))
    assert len(bits) == 10
    assert all(bit in source + "\n" and bit.count("\n") <= 12 for bit in bits)
