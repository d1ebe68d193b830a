"""The train-draft command."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import OptionError
from ..training.settings import DIVERGENCES, Collecting, Distilling, Shape
from .pairs import load_pair
from .process import Version
from .training_bars import watcher

if TYPE_CHECKING:
    from ..training.divergence import Closeness
    from ..training.draft import Trained

COLLECTING, DISTILLING = Collecting(), Distilling()


def train_draft(
    model: Annotated[
        str, typer.Option("--model", "--model-name", help="The target: a directory or a Hub name.")
    ],
    data: Annotated[
        Path,
        typer.Option(
            "--data", help='Texts, one a line, or JSON lines with "prompt" and maybe "target".'
        ),
    ],
    draft_model: Annotated[
        str | None, typer.Option("--draft-model", help="The draft to begin with.")
    ] = None,
    layers: Annotated[
        int | None, typer.Option("--layers", help="Or so many of the target's own layers.")
    ] = None,
    width: Annotated[
        int | None, typer.Option("--width", help="With --layers: another width, random weights.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Where to write; weights/NAME-distilled by default."),
    ] = None,
    divergence: Annotated[
        str, typer.Option("--divergence", help=f"What is made small: {', '.join(DIVERGENCES)}.")
    ] = DISTILLING.divergence,
    no_self_distill: Annotated[
        bool,
        typer.Option("--no-self-distill", help="Learn on the data, not on the target's text."),
    ] = False,
    samples: Annotated[
        int, typer.Option("--samples", help="Most texts to learn from.")
    ] = COLLECTING.samples,
    length: Annotated[int, typer.Option("--length", help="Tokens of a text.")] = COLLECTING.length,
    temperature: Annotated[
        float,
        typer.Option("--temperature", "--temp", help="At which the target continues the prompts."),
    ] = COLLECTING.temperature,
    texts_at_once: Annotated[
        int, typer.Option("--texts-at-once", help="Texts that the target writes in one pass.")
    ] = COLLECTING.texts_at_once,
    batch: Annotated[int, typer.Option("--batch", help="Texts in one step.")] = DISTILLING.batch,
    epochs: Annotated[int, typer.Option("--epochs", help="At most.")] = DISTILLING.epochs,
    learning_rate: Annotated[
        float, typer.Option("--learning-rate", "--lr", help="Its highest.")
    ] = DISTILLING.learning_rate,
    patience: Annotated[
        int, typer.Option("--patience", help="Epochs without progress that end it.")
    ] = DISTILLING.patience,
    seed: Annotated[int, typer.Option("--seed")] = DISTILLING.seed,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Of the target: auto, float32, float16 or bfloat16.")
    ] = "auto",
    version: Version = False,
) -> None:
    """Train a draft model for a target on this machine. Interrupted, it goes on when run again."""
    shape = _shape(draft_model, layers, width)
    collecting = Collecting(
        samples=samples,
        length=length,
        self_distill=not no_self_distill,
        temperature=temperature,
        seed=seed,
        texts_at_once=texts_at_once,
    )
    distilling = Distilling(
        batch=batch,
        epochs=epochs,
        learning_rate=learning_rate,
        patience=patience,
        seed=seed,
        divergence=divergence,
    )
    name = os.path.basename(os.path.normpath(os.path.expanduser(model)))
    output = output or Path("weights") / f"{name}-distilled"
    pair = load_pair(model, draft_model, dtype=dtype)
    from ..training.draft import train

    with watcher(_line) as watching:
        done = train(pair, data, output, shape, collecting, distilling, watching)
    print(_summary(done), file=sys.stderr)


def _shape(draft_model: str | None, layers: int | None, width: int | None) -> Shape | None:
    if (draft_model is None) == (layers is None):
        raise OptionError("give either --draft-model, a draft to begin with, or --layers")
    if layers is None:
        if width is not None:
            raise OptionError("a draft that is there has a width: leave --width out")
        return None
    return Shape(layers, width)


def _line(epoch: int, closeness: Closeness) -> str:
    where = f"epoch {epoch}" if epoch else "start"
    return f"{where}: held-out loss {closeness.loss:.3f}, {_shares(closeness)}"


def _shares(closeness: Closeness) -> str:
    return (
        f"acceptance at temperature 1 {closeness.acceptance:.1%}, "
        f"same first choice {closeness.agreement:.1%}"
    )


def _summary(done: Trained) -> str:
    outcome = done.outcome
    again = ", going on from an earlier run" if done.resumed else ""
    learned = f"{outcome.epochs} epochs on {done.rows} tokens in {done.seconds:.0f} s{again}"
    if not done.gained:
        return f"{done.output}: no gain, the start is kept, after {learned}"
    return (
        f"{done.output}: {learned}; on {done.held_out} held-out tokens "
        f"{_shares(outcome.figures)}; at the start {_shares(done.start)}"
    )
