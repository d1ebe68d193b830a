"""The train-medusa command."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..training.config import HeadsConfig
from .flags import Flags, command, flag
from .groups import FITTING, HeadSchedule, Model, TrainingTexts
from .pairs import default_output, load_pair
from .training_bars import watcher

if TYPE_CHECKING:
    from ..training.head_task import Accuracy
    from ..training.run import Trained


@dataclass(frozen=True)
class Heads(Flags):
    """What the heads are, and where they are written."""

    panel = "Heads"
    output: Path | None = flag(
        None, "The directory to write to.", show_default="weights/NAME-medusa"
    )
    heads: int = flag(FITTING.heads, "The number of heads, each of which drafts one token.")
    layers: int = flag(FITTING.layers, "The number of residual layers in a head.")
    own_output: bool = flag(
        FITTING.own_output, "Train an output layer for each head, which is better and larger."
    )


@command("mlx-specdec train-medusa --model weights/py-llama --data texts.txt")
def train_medusa(model: Model, heads: Heads, texts: TrainingTexts, schedule: HeadSchedule) -> None:
    """Train Medusa heads for a model on this machine. An interrupted run is resumed."""
    collecting = texts.collecting(schedule.seed)
    fitting = HeadsConfig(
        **vars(schedule), heads=heads.heads, layers=heads.layers, own_output=heads.own_output
    )
    output = heads.output or default_output(model.model, "medusa")
    pair = load_pair(model.model, dtype=model.dtype)
    from ..training.medusa import train

    with watcher(_line) as watching:
        done = train(pair, texts.data, output, collecting, fitting, watching)
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


def _summary(done: Trained[Accuracy]) -> str:
    outcome = done.outcome
    again = ", going on from an earlier run" if done.resumed else ""
    return (
        f"{done.output}: {outcome.epochs} epochs on {done.rows} tokens in {done.seconds:.0f} s"
        f"{again}; on {done.held_out} held-out tokens {_shares(outcome.figures)}"
    )
