"""Prompts that Medusa heads of the models in weights/ are trained on, as JSON lines.

    python benchmarks/make_head_prompts.py python --output python.prompts.jsonl
    python benchmarks/make_head_prompts.py translation --data en_fr.train.tsv \
        --output translation.prompts.jsonl
    mlx-specdec train-medusa --model weights/py-llama --data python.prompts.jsonl ...

Only beginnings: the model itself writes what follows. Material and licences: weights/README.md.
Files of the standard library that the models were not trained on are left out; --held-out takes
those.
"""

import argparse
import ast
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from demo_training.texts import (
    PREFIX,
    library_files,
    read_pairs,
    read_texts,
    split,
    with_joined,
    with_lists,
)

FUNCTIONS = 0.8
"""Share of the Python prompts that are the beginning of a function; the rest are bits of files."""
LONGEST = 600
"""Characters of a Python prompt."""


def function_beginnings(source: str) -> Iterator[str]:
    """Every function's head and docstring, without the indentation of what it stands in."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0]
        documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        end = (first.end_lineno or first.lineno) if documented else first.lineno - 1
        if end < node.lineno:  # all in one line
            continue
        taken = lines[node.lineno - 1 : end]
        yield "\n".join(line[min(node.col_offset, _indent(line)) :] for line in taken) + "\n"


def file_bits(source: str, dice: random.Random) -> Iterator[str]:
    """A bit of 4 to 12 lines for every 60 lines of a file."""
    lines = source.split("\n")
    for _ in range(len(lines) // 60):
        start = dice.randrange(len(lines))
        yield "\n".join(lines[start : start + dice.randint(4, 12)]) + "\n"


def python_prompts(files: list[Path], count: int, dice: random.Random) -> list[str]:
    """Beginnings of functions and bits of files, none of them twice."""
    functions: list[str] = []
    bits: list[str] = []
    for source in read_texts(files):
        try:
            functions += function_beginnings(source)
        except SyntaxError:  # the library has some on purpose, to test its compiler
            continue
        bits += file_bits(source, dice)
    wanted = round(FUNCTIONS * count)
    return [*_some(functions, wanted, dice), *_some(bits, count - wanted, dice)]


def translation_prompts(data: Path, count: int, dice: random.Random) -> list[str]:
    """English sentences, some of them joined and some lists, as the translator was taught."""
    pairs = with_joined(with_lists(read_pairs(data), dice), dice)
    return [PREFIX + english for english in _some([english for english, _ in pairs], count, dice)]


def _some(texts: list[str], count: int, dice: random.Random) -> list[str]:
    usable = [text for text in dict.fromkeys(texts) if text.strip() and len(text) <= LONGEST]
    return dice.sample(usable, min(count, len(usable)))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kind", choices=["python", "translation"])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1000, help="most prompts")
    parser.add_argument("--library", type=Path, help="folder of .py files")
    parser.add_argument("--held-out", action="store_true", help="from held-out files")
    parser.add_argument("--data", type=Path, help="English, tab, French")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dice = random.Random(args.seed)
    if args.kind == "python":
        files = split(library_files(args.library))[args.held_out]
        prompts = python_prompts(list(files), args.count, dice)
    elif args.data is None:
        sys.exit("error: translation needs --data")
    else:
        prompts = translation_prompts(args.data, args.count, dice)
    dice.shuffle(prompts)
    lines = [json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in prompts]
    args.output.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
