"""The train-medusa command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..training.settings import Collecting, Fitting
from .pairs import load_pair
from .process import Version
from .training_bars import watcher

if TYPE_CHECKING:
    from ..training.medusa import Trained
    from ..training.new_heads import Accuracy

COLLECTING, FITTING = Collecting(), Fitting()


def train_medusa(
    model: Annotated[
        str, typer.Option("--model", "--model-name", help="The base: a directory or a Hub name.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data", help='Texts, one a line, or JSON lines with "prompt" and maybe "target".'
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where to write; weights/NAME-medusa by default."),
    ] = None,
    heads: Annotated[
        int, typer.Option("--heads", help="Tokens that may be drafted at once.")
    ] = FITTING.heads,
    layers: Annotated[
        int, typer.Option("--layers", help="Residual layers of a head.")
    ] = FITTING.layers,
    own_output: Annotated[
        bool, typer.Option("--own-output", help="An output layer for each head: better, larger.")
    ] = FITTING.own_output,
    no_self_distill: Annotated[
        bool,
        typer.Option("--no-self-distill", help="Learn from the data, not from the model's text."),
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", help="Most texts to learn from.")
    ] = COLLECTING.samples,
    length: Annotated[int, typer.Option("--length", help="Tokens of a text.")] = COLLECTING.length,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "--temp", help="At which the model continues the prompts."),
    ] = COLLECTING.temperature,
    texts_at_once: Annotated[
        int, typer.Option("--texts-at-once", help="Texts that the model writes in one pass.")
    ] = COLLECTING.texts_at_once,
    batch: Annotated[
        int, typer.Option("--batch", help="Hidden states in one step.")
    ] = FITTING.batch,
    epochs: Annotated[int, typer.Option("--epochs", help="At most.")] = FITTING.epochs,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", help="Its highest.")
    ] = FITTING.learning_rate,
    patience: Annotated[
        int, typer.Option("--patience", help="Epochs without progress that end it.")
    ] = FITTING.patience,
    seed: Annotated[int, typer.Option("--seed")] = FITTING.seed,
    dtype: Annotated[
        str, typer.Option("--dtype", help="auto, float32, float16 or bfloat16.")
    ] = "auto",
    version: Version = False,
) -> None:
    """Train Medusa heads for a model on this machine. Interrupted, it goes on when run again."""
    collecting = Collecting(samples, length, not no_self_distill, temperature, seed, texts_at_once)
    fitting = Fitting(
        heads=heads,
        layers=layers,
        own_output=own_output,
        batch=batch,
        epochs=epochs,
        learning_rate=learning_rate,
        patience=patience,
        seed=seed,
    )
    name = os.path.basename(os.path.normpath(os.path.expanduser(model)))
    output = output or Path("weights") / f"{name}-medusa"
    pair = load_pair(model, None, dtype=dtype)
    from ..training.medusa import train

    with watcher(_line) as watching:
        done = train(pair, data, output, collecting, fitting, watching)
    print(_summary(done), file=sys.stderr)


def _line(epoch: int, accuracy: Accuracy) -> str:
    return f"epoch {epoch}: held-out loss {accuracy.loss:.3f}, {_shares(accuracy)}"


def _shares(accuracy: Accuracy) -> str:
    """Top-1 and top-5 accuracy of each head."""
    pairs = zip(accuracy.top1, accuracy.top5, strict=True)
    return "; ".join(
        f"head {at} top-1 {first:.1%} top-5 {among:.1%}"
        for at, (first, among) in enumerate(pairs, start=1)
    )


def _summary(done: Trained) -> str:
    outcome = done.outcome
    again = ", going on from an earlier run" if done.resumed else ""
    return (
        f"{done.output}: {outcome.epochs} epochs on {done.rows} tokens in {done.seconds:.0f} s"
        f"{again}; on {done.held_out} held-out tokens {_shares(outcome.figures)}"
    )
