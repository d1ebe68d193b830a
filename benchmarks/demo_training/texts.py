"""What the demo models are trained on: files of Python, and pairs of sentences. Needs no torch."""

import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from .lists import list_sentence

HELD_OUT = 40
PREFIX = "translate English to French: "
JOINED_SHARE = 0.12
LIST_SHARE = 0.08


def library_files(root: Path | None = None) -> list[Path]:
    """The standard library's .py files without encodings/, in a fixed order."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = [
        file
        for file in root.rglob("*.py")
        if not {"encodings", "site-packages", "__pycache__"} & set(file.relative_to(root).parts)
    ]
    return sorted(files)


def split(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to learn from, and HELD_OUT others (fewer of a small library), always the same."""
    order = list(files)
    random.Random(0).shuffle(order)
    count = min(HELD_OUT, len(order) // 4)
    return order[count:], order[:count]


def read_texts(files: Sequence[Path]) -> list[str]:
    """The files that are UTF-8."""
    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError:
            continue
    return texts


def read_pairs(file: Path) -> list[tuple[str, str]]:
    """Lines of English, tab, French; further columns are ignored."""
    lines = file.read_text(encoding="utf-8").splitlines()
    fields = (line.split("\t") for line in lines if "\t" in line)
    return [(source, target) for source, target, *_ in fields]


def with_joined(pairs: Sequence[tuple[str, str]], dice: random.Random) -> list[tuple[str, str]]:
    """The pairs, some of them joined by two to four: single sentences do not teach length."""
    result = []
    rest = list(pairs)
    dice.shuffle(rest)
    while rest:
        count = dice.choice([2, 2, 3, 4]) if dice.random() < JOINED_SHARE else 1
        group, rest = rest[-count:], rest[: len(rest) - count]
        result.append((" ".join(s for s, _ in group), " ".join(t for _, t in group)))
    return result


def with_lists(pairs: Sequence[tuple[str, str]], dice: random.Random) -> list[tuple[str, str]]:
    """The pairs and, for every hundred, some sentences of ours with lists of things."""
    return [*pairs, *(list_sentence(dice) for _ in range(round(LIST_SHARE * len(pairs))))]
