"""The commands that train Medusa heads, draft models and hidden-state drafters. Imports no MLX."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from ..checkpoints.stored_models import names as stored_names
from ..errors import OptionError
from ..system import check_not_read
from ..training.config import DrafterConfig, HeadsConfig, TrainConfig
from . import interrupts, render
from .flags import REQUIRED, Flags, command, flag
from .loading import DTYPE, Dtype, load_pair

DISTILLING, FITTING, DRAFTING = TrainConfig(), HeadsConfig(), DrafterConfig()


class TrainingFlags(Flags, panel="Training"):
    model: str = flag(
        "The model: a directory, a name on the Hugging Face Hub, lmstudio:PUBLISHER/NAME or "
        "ollama:NAME:TAG.",
        REQUIRED,
        "--model-name",
        panel="Model",
        autocompletion=stored_names,
    )
    dtype: Dtype = flag(DTYPE, "auto", panel="Model")
    data: Path = flag(
        'A file with one prompt a line, or JSON lines with "prompt", and with "target", its '
        "completion, for --no-self-distill.",
        REQUIRED,
        metavar="FILE",
    )
    no_self_distill: bool = flag("Train on the data, instead of completions by the model.")
    samples: int = flag("The largest number of texts to learn from.", DISTILLING.samples)
    length: int = flag("The largest number of tokens of a text.", DISTILLING.length)
    output: Path | None = flag(
        "The directory to write to.", show_default="weights/NAME-medusa, -distilled or -dspark"
    )
    epochs: int = flag("The largest number of passes over the data.", FITTING.epochs)
    learning_rate: float | None = flag(
        "The highest learning rate.",
        None,
        "--lr",
        show_default=f"draft {DISTILLING.learning_rate}, otherwise {FITTING.learning_rate}",
    )

    def settings(self) -> dict[str, Any]:
        """Return the settings of the training that were given. The defaults of others depend on
        what is trained."""
        names = ("samples", "length", "layers", "batch", "epochs", "learning_rate")
        values = {name: getattr(self, name) for name in names}
        values["self_distill"] = not self.no_self_distill
        return {name: value for name, value in values.items() if value is not None}


class Heads(TrainingFlags, panel="Heads"):
    layers: int = flag("The number of residual layers in each head.", FITTING.layers)
    batch: int = flag("The number of hidden states in one step.", FITTING.batch)
    heads: int = flag("The number of heads. Each head drafts one token.", FITTING.heads)
    own_output: bool = flag(
        "Train an output layer for each head, which is better and larger.", FITTING.own_output
    )


class Draft(TrainingFlags, panel="Draft"):
    kind: Literal["draft", "dspark"] = flag(
        "Train a draft model (draft), or a drafter on the target's hidden states (dspark).", "draft"
    )
    layers: int | None = flag(
        "The number of the target's layers, evenly spaced, that a new draft begins with; or the "
        "number of new layers in a dspark.",
        show_default="for a dspark, a quarter of the target's, 5 at most",
    )
    draft_model: str | None = flag(
        "An existing draft to train further. A draft needs either this or --layers."
    )
    batch: int = flag("The number of texts in one step.", DISTILLING.batch)
    num_draft: int = flag(
        "The number of tokens that a dspark learns to draft at once.", DRAFTING.num_draft
    )


@command("mlx-specdec train-medusa --model weights/py-llama --data texts.txt")
def train_medusa(flags: Heads) -> None:
    """Train Medusa heads for a model on this machine. An interrupted run is resumed."""
    config = HeadsConfig(**flags.settings(), heads=flags.heads, own_output=flags.own_output)
    from ..training.medusa import train

    _run(train, flags, config, "medusa")


@command("mlx-specdec train-draft --model weights/py-llama --layers 1 --data texts.txt")
def train_draft(flags: Draft) -> None:
    """Train a draft model for a target on this machine. An interrupted run is resumed."""
    if flags.kind == "dspark":
        if flags.draft_model is not None:
            raise OptionError("dspark begins with new weights: leave --draft-model out")
        drafting = DrafterConfig(**flags.settings(), num_draft=flags.num_draft)
        from ..training.drafter import train as train_drafter

        _run(train_drafter, flags, drafting, "dspark")
        return
    if (flags.draft_model is None) == (flags.layers is None):
        raise OptionError("give either --draft-model, a draft to begin with, or --layers")
    distilling = TrainConfig(**flags.settings())
    from ..training.draft import train

    _run(train, flags, distilling, "distilled", flags.draft_model)


def _run(
    train: Callable[..., str],
    flags: TrainingFlags,
    config: TrainConfig,
    what: str,
    draft_model: str | None = None,
) -> None:
    """Train with progress bars and a line after every epoch, and print the result. Raises
    OutputError if the training reads the output. what: The end of the output's default name."""
    name = os.path.basename(os.path.normpath(os.path.expanduser(flags.model)))
    output = flags.output or Path("weights") / f"{name}-{what}"
    if flags.output is not None:
        check_not_read("--output", [output], [flags.model, flags.data, draft_model])
    pair = load_pair(flags.model, draft_model, dtype=flags.dtype)
    if pair.heads is not None:
        raise OptionError(f"{pair.name} is Medusa heads: give the base model that they name")
    from ..training.fit import Watcher

    def line(epoch: int, figures: Any) -> None:
        where = f"epoch {epoch}" if epoch else "start"
        print(f"{where}: held-out loss {figures.loss:.3f}, {figures.describe()}", file=sys.stderr)

    interrupts.at_end(lambda: "interrupted: the same command goes on from here")
    with render.progress("reading texts") as collected, render.progress("training") as steps:
        watcher = Watcher(
            collected=collected,
            stepped=lambda done, total, loss: steps(done, total, f"training, loss {loss:.3f}"),
            measured=line,
        )
        report = train(pair, flags.data, output, config, watcher)
    interrupts.at_end(str)
    render.tell(report)
