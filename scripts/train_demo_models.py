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
from typing import Any

import torch
from demo_training import evaluate, python_code, translation
from demo_training.optimise import Budget


def parser() -> argparse.ArgumentParser:
    """All subcommands and their flags."""
    main = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = main.add_subparsers(dest="command", required=True)
    for name in ("translation-target", "translation-draft", "python-target", "python-draft"):
        command = commands.add_parser(name)
        command.add_argument("--output", type=Path, required=True)
        command.add_argument("--start", type=Path, help="go on from this checkpoint")
        command.add_argument("--minutes", type=float, help="train for this long")
        command.add_argument("--steps", type=int, help="train for this many steps")
        command.add_argument("--rate", type=float, default=1.2e-3, help="highest learning rate")
        command.add_argument("--seed", type=int, default=0)
        if name.endswith("draft"):
            command.add_argument("--teacher", type=Path, required=True)
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


def common(args: argparse.Namespace) -> dict[str, Any]:
    """What every training takes."""
    if args.minutes is None and args.steps is None:
        sys.exit("error: give --minutes or --steps")
    budget = Budget(args.minutes, args.steps)
    return {"output": args.output, "rate": args.rate, "budget": budget, "seed": args.seed}


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.command == "translation-target":
        translation.train_target(
            data=args.data,
            start=args.start,
            decoder_layers=args.decoder_layers,
            width=args.width,
            layers=args.layers,
            **common(args),
        )
    elif args.command == "translation-draft":
        translation.train_draft(
            data=args.data,
            teacher_path=args.teacher,
            start=args.start,
            generated=args.generated,
            **common(args),
        )
    elif args.command == "python-target":
        python_code.train_target(
            library=args.library,
            start=args.start,
            width=args.width,
            layers=args.layers,
            **common(args),
        )
    elif args.command == "python-draft":
        python_code.train_draft(
            library=args.library, teacher_path=args.teacher, start=args.start, **common(args)
        )
    elif args.command == "evaluate-translation":
        print(json.dumps(evaluate.translation(args.model, args.draft, args.data, args.limit)))
    else:
        print(json.dumps(evaluate.python_code(args.model, args.draft, args.library, args.limit)))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.manual_seed(0)
    run(parser().parse_args())
