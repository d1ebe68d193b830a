"""Train the models in weights/: the recipe of record. Needs `pip install -e '.[train]'`.

    python scripts/train_demo_models.py translation-target --data en_fr.train.tsv --output t5-enfr
    python scripts/train_demo_models.py translation-draft --data en_fr.train.tsv \
        --teacher t5-enfr --output t5-enfr-draft
    python scripts/train_demo_models.py python-target --output py-llama
    python scripts/train_demo_models.py python-draft --teacher py-llama --output py-llama-draft
    python scripts/train_demo_models.py evaluate-translation --model t5-enfr \
        --draft t5-enfr-draft --data en_fr.dev.tsv

A run that was cut off goes on where it was when the same command is given again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from demo_training import evaluate, python_code, translation
from demo_training.optimise import Budget

TRAININGS = {
    "translation-target": translation.train_target,
    "translation-draft": translation.train_draft,
    "python-target": python_code.train_target,
    "python-draft": python_code.train_draft,
}


def parser() -> argparse.ArgumentParser:
    """All subcommands and their flags."""
    main = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = main.add_subparsers(dest="command", required=True)
    for name in TRAININGS:
        command = commands.add_parser(name)
        command.add_argument("--output", type=Path, required=True)
        command.add_argument("--start", type=Path, help="go on from this checkpoint")
        command.add_argument("--minutes", type=float, help="train for this long")
        command.add_argument("--steps", type=int, help="train for this many steps")
        command.add_argument("--rate", type=float, default=1.2e-3, help="highest learning rate")
        command.add_argument("--seed", type=int, default=0)
        if name.endswith("draft"):
            command.add_argument("--teacher", type=Path, required=True, dest="teacher_path")
        else:
            command.add_argument("--width", type=int, default=256)
            layers = 4 if name.startswith("translation") else 8
            command.add_argument("--layers", type=int, default=layers)
        if name.startswith("translation"):
            command.add_argument("--data", type=Path, required=True, help="English, tab, French")
        else:
            command.add_argument("--library", type=Path, help="folder of .py files")
        if name == "translation-target":
            command.add_argument("--decoder-layers", type=int, default=8)
        if name == "translation-draft":
            command.add_argument("--generated", type=int, default=20_000)
    for name in ("evaluate-translation", "evaluate-python"):
        command = commands.add_parser(name)
        command.add_argument("--model", type=Path, required=True)
        command.add_argument("--draft", type=Path)
        command.add_argument("--limit", type=int, default=1000 if "translation" in name else 100)
        option = "--data" if "translation" in name else "--library"
        command.add_argument(option, type=Path, required="translation" in name)
    return main


def run(args: argparse.Namespace) -> None:
    """Run the command. What a training takes has the names of its flags."""
    if args.command in TRAININGS:
        given = vars(args)
        train = TRAININGS[given.pop("command")]
        budget = Budget(given.pop("minutes"), given.pop("steps"))
        if budget == Budget():
            sys.exit("error: give --minutes or --steps")
        train(budget=budget, **given)
    elif args.command == "evaluate-translation":
        print(json.dumps(evaluate.translation(args.model, args.draft, args.data, args.limit)))
    else:
        print(json.dumps(evaluate.python_code(args.model, args.draft, args.library, args.limit)))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    run(parser().parse_args())
