"""Train the models in weights/: the recipe of record. Needs `pip install -e '.[train]'`.

    python benchmarks/train_demo_models.py translation-target --data pairs.tsv --output t5-enfr
    python benchmarks/train_demo_models.py translation-draft --data pairs.tsv --teacher t5-enfr \
        --output t5-enfr-draft
    python benchmarks/train_demo_models.py python-target --output py-llama
    python benchmarks/train_demo_models.py python-draft --teacher py-llama --output py-llama-draft

A run that was cut off goes on where it was when the same command is given again.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
from demo_training import python_code, translation
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
    return main


def run(args: argparse.Namespace) -> None:
    """Run a training, whose parameters have the names of the flags."""
    flags = vars(args)
    train = TRAININGS[flags.pop("command")]
    budget = Budget(flags.pop("minutes"), flags.pop("steps"))
    if budget == Budget():
        sys.exit("error: give --minutes or --steps")
    train(budget=budget, **flags)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    run(parser().parse_args())
