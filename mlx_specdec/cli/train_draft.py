"""The train-draft command."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import OptionError
from ..training.config import DistillConfig, DraftConfig
from .flags import Flags, command, flag
from .groups import DraftSchedule, Model, TrainingTexts
from .pairs import default_output, load_pair
from .training_bars import watcher

if TYPE_CHECKING:
    from ..training.draft_task import Closeness
    from ..training.run import Trained


@dataclass(frozen=True)
class Draft(Flags):
    """What the training begins with, where it ends, and what it minimizes."""

    panel = "Draft"
    draft_model: str | None = flag(None, "The draft model to begin with.")
    layers: int | None = flag(None, "The number of the target's own layers to begin with instead.")
    width: int | None = flag(None, "Another width for these layers, whose weights are then random.")
    output: Path | None = flag(
        None, "The directory to write to.", show_default="weights/NAME-distilled"
    )
    divergence: Literal["forward", "reverse", "jsd", "tvd"] = flag(
        "forward", "The distance between target and draft that training minimizes."
    )


@command("mlx-specdec train-draft --model weights/py-llama --layers 1 --data texts.txt")
def train_draft(model: Model, draft: Draft, texts: TrainingTexts, schedule: DraftSchedule) -> None:
    """Train a draft model for a target on this machine. An interrupted run is resumed."""
    shape = _shape(draft.draft_model, draft.layers, draft.width)
    collecting = texts.collecting(schedule.seed)
    distilling = DistillConfig(**vars(schedule), divergence=draft.divergence)
    output = draft.output or default_output(model.model, "distilled")
    pair = load_pair(model.model, draft.draft_model, dtype=model.dtype)
    from ..training.draft import train

    with watcher(_line) as watching:
        done = train(pair, texts.data, output, shape, collecting, distilling, watching)
    print(_summary(done), file=sys.stderr)


def _shape(draft_model: str | None, layers: int | None, width: int | None) -> DraftConfig | None:
    if (draft_model is None) == (layers is None):
        raise OptionError("give either --draft-model, a draft to begin with, or --layers")
    if layers is None:
        if width is not None:
            raise OptionError("a draft that is there has a width: leave --width out")
        return None
    return DraftConfig(layers, width)


def _line(epoch: int, closeness: Closeness) -> str:
    where = f"epoch {epoch}" if epoch else "start"
    return f"{where}: held-out loss {closeness.loss:.3f}, {_shares(closeness)}"


def _shares(closeness: Closeness) -> str:
    return (
        f"acceptance at temperature 1 {closeness.acceptance:.1%}, "
        f"same first choice {closeness.agreement:.1%}"
    )


def _summary(done: Trained[Closeness]) -> str:
    outcome = done.outcome
    again = ", going on from an earlier run" if done.resumed else ""
    learned = f"{outcome.epochs} epochs on {done.rows} tokens in {done.seconds:.0f} s{again}"
    if done.start is None or done.outcome.best == 0:
        return f"{done.output}: no gain, the start is kept, after {learned}"
    return (
        f"{done.output}: {learned}; on {done.held_out} held-out tokens "
        f"{_shares(outcome.figures)}; at the start {_shares(done.start)}"
    )
