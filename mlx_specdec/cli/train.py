"""The commands that train Medusa heads, draft models and hidden-state drafters. Imports no MLX."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..checkpoints.disk import check_not_read
from ..errors import OptionError
from ..training.config import DataConfig, DistillConfig, DraftConfig, DrafterConfig, HeadsConfig
from . import interrupts, render
from .flags import REQUIRED, Flags, command, flag, group
from .loading import ModelFlags, load_pair

if TYPE_CHECKING:
    from ..training.anchors import Drafted
    from ..training.draft import Closeness
    from ..training.fit import Trained, Watcher
    from ..training.medusa import Accuracy


COLLECTING, DISTILLING, FITTING = DataConfig(), DistillConfig(), HeadsConfig()
DRAFTING = DrafterConfig()


@group("Data")
class TrainingTexts(Flags):
    data: Path = flag(
        REQUIRED,
        'A file with one text a line, or JSON lines with "prompt" and maybe "target".',
        metavar="FILE",
    )
    no_self_distill: bool = flag(False, "Learn from the data and not from the model's own text.")
    samples: int = flag(COLLECTING.samples, "The largest number of texts to learn from.")
    length: int = flag(COLLECTING.length, "The number of tokens of a text.")
    temperature: str = flag(
        ",".join(f"{value:g}" for value in COLLECTING.temperatures),
        "The temperatures at which the model writes, as many texts at each.",
        "--temp",
        metavar="NUMBER,...",
    )
    texts_at_once: int = flag(
        COLLECTING.texts_at_once, "The number of texts that the model writes in one pass."
    )

    def collecting(self, seed: int) -> DataConfig:
        """Return the settings of the training data. Raises OptionError if a flag is wrong."""
        try:
            temperatures = tuple(float(word) for word in self.temperature.split(","))
        except ValueError:
            raise OptionError(
                "temperature must be numbers with commas between them, not "
                f"{self.temperature!a:.60}"
            ) from None
        sizes = {name: getattr(self, name) for name in ("samples", "length", "texts_at_once")}
        distill = not self.no_self_distill
        return DataConfig(**sizes, self_distill=distill, temperatures=temperatures, seed=seed)


@group("Training")
class HeadSchedule(Flags):
    batch: int = flag(FITTING.batch, "The number of hidden states in one step.")
    epochs: int = flag(FITTING.epochs, "The largest number of passes over the data.")
    learning_rate: float = flag(FITTING.learning_rate, "The highest learning rate.", "--lr")
    patience: int = flag(
        FITTING.patience, "The number of epochs without progress after which training ends."
    )
    seed: int = flag(FITTING.seed, "The seed of the data's order and of new weights.")


@group()
class DraftSchedule(HeadSchedule):
    batch: int | None = flag(  # type: ignore[assignment]
        None,
        "The number of texts in one step.",
        show_default=f"{DISTILLING.batch}; dspark {DRAFTING.batch}",
    )
    learning_rate: float | None = flag(  # type: ignore[assignment]
        None,
        "The highest learning rate.",
        "--lr",
        show_default=f"{DISTILLING.learning_rate}; dspark {DRAFTING.learning_rate}",
    )

    def given(self) -> dict[str, Any]:
        """Return the flags that were given. The defaults of other flags depend on the kind."""
        return {name: value for name, value in vars(self).items() if value is not None}


@group("Heads")
class Heads(Flags):
    output: Path | None = flag(
        None, "The directory to write to.", show_default="weights/NAME-medusa"
    )
    heads: int = flag(FITTING.heads, "The number of heads, each of which drafts one token.")
    layers: int = flag(FITTING.layers, "The number of residual layers in a head.")
    own_output: bool = flag(
        FITTING.own_output, "Train an output layer for each head, which is better and larger."
    )


@group("Draft")
class Draft(Flags):
    kind: Literal["draft", "dspark"] = flag(
        "draft",
        "What to train: a draft model, or a drafter on the target's hidden states (dspark).",
    )
    draft_model: str | None = flag(None, "The draft model to begin with.")
    layers: int | None = flag(
        None,
        "The number of the target's own layers to begin with instead; of a dspark, that of its "
        "new layers.",
    )
    num_draft: int = flag(
        DRAFTING.num_draft, "The number of tokens that a dspark learns to draft at once."
    )
    width: int | None = flag(None, "Another width for these layers, whose weights are then random.")
    output: Path | None = flag(
        None, "The directory to write to.", show_default="weights/NAME-distilled or -KIND"
    )
    divergence: Literal["forward", "reverse", "jsd", "tvd"] = flag(
        "forward", "The distance between target and draft that training minimizes."
    )

    def shape(self) -> DraftConfig | None:
        """Return the shape of a draft model that is made of the target's layers, or None if the
        training begins with a draft model. Raises OptionError if flags are wrong."""
        if (self.draft_model is None) == (self.layers is None):
            raise OptionError("give either --draft-model, a draft to begin with, or --layers")
        if self.layers is not None:
            return DraftConfig(self.layers, self.width)
        if self.width is not None:
            raise OptionError("a draft that is there has a width: leave --width out")
        return None

    def drafter(self, schedule: DraftSchedule) -> DrafterConfig:
        """Return the settings of a hidden-state drafter. Raises OptionError if flags are wrong."""
        if self.draft_model is not None or self.width is not None:
            raise OptionError(
                f"{self.kind} begins with new weights of the target's width: leave --draft-model "
                "and --width out"
            )
        return DrafterConfig(**schedule.given(), layers=self.layers, num_draft=self.num_draft)


@command("mlx-specdec train-medusa --model weights/py-llama --data texts.txt")
def train_medusa(
    model: ModelFlags, heads: Heads, texts: TrainingTexts, schedule: HeadSchedule
) -> None:
    """Train Medusa heads for a model on this machine. An interrupted run is resumed."""
    collecting = texts.collecting(schedule.seed)
    wanted = {name: value for name, value in vars(heads).items() if name != "output"}
    fitting = HeadsConfig(**vars(schedule), **wanted)
    output = _output(heads.output, "medusa", model.model, texts.data)
    pair = load_pair(model.model, dtype=model.dtype)
    from ..training.medusa import train

    _run(_by_head, partial(train, pair, texts.data, output, collecting, fitting))


@command("mlx-specdec train-draft --model weights/py-llama --layers 1 --data texts.txt")
def train_draft(
    model: ModelFlags, draft: Draft, texts: TrainingTexts, schedule: DraftSchedule
) -> None:
    """Train a draft model for a target on this machine. An interrupted run is resumed."""
    collecting = texts.collecting(schedule.seed)
    if draft.kind != "draft":
        config = draft.drafter(schedule)
        output = _output(draft.output, draft.kind, model.model, texts.data)
        pair = load_pair(model.model, dtype=model.dtype)
        from ..training.drafter import train as train_drafter

        fit = partial(train_drafter, pair, texts.data, output, collecting, config)
        return _run(_drafted, fit)
    shape = draft.shape()
    distilling = DistillConfig(**schedule.given(), divergence=draft.divergence)
    output = _output(draft.output, "distilled", model.model, texts.data, draft.draft_model)
    pair = load_pair(model.model, draft.draft_model, dtype=model.dtype)
    from ..training.draft import train

    _run(_closeness, partial(train, pair, texts.data, output, shape, collecting, distilling))


def _output(given: Path | None, what: str, model: str, *inputs: Path | str | None) -> Path:
    """Return the directory to write to. Raises OutputError if the training reads it."""
    if given is None:
        name = os.path.basename(os.path.normpath(os.path.expanduser(model)))
        return Path("weights") / f"{name}-{what}"
    check_not_read("--output", [given], [model, *inputs])
    return given


def _run(describe: Callable[[Any], str], train: Callable[[Watcher], Trained]) -> None:
    """Train with progress bars and a line after every epoch, and print the result. describe:
    Returns the figures of an epoch in words."""
    from ..training.fit import Watcher

    def line(epoch: int, figures: Any) -> None:
        where = f"epoch {epoch}" if epoch else "start"
        print(f"{where}: held-out loss {figures.loss:.3f}, {describe(figures)}", file=sys.stderr)

    interrupts.at_end(lambda: "interrupted: the same command goes on from here")
    with render.progress("reading texts") as collected, render.progress("training") as steps:
        done = train(
            Watcher(
                collected=collected,
                stepped=lambda done, total, loss: steps(done, total, f"training, loss {loss:.3f}"),
                measured=line,
            )
        )
    interrupts.at_end(str)
    gained = done.outcome.best > 0
    start = f"; at the start {describe(done.start)}" if done.start is not None and gained else ""
    again = ", with what an earlier run had left" if done.resumed else ""
    render.tell(
        f"{done.output}: {'' if gained else 'no gain, the start is kept, after '}"
        f"{done.outcome.epochs} epochs on {done.rows} tokens in {done.seconds:.0f} s{again}; "
        f"on {done.held_out} held-out tokens {describe(done.outcome.figures)}{start}"
    )


def _by_head(accuracy: Accuracy) -> str:
    """Return the top-1 and top-5 accuracy of each head in words."""
    pairs = zip(accuracy.top1, accuracy.top5, strict=True)
    return "; ".join(
        f"head {at} top-1 {first:.1%} top-5 {among:.1%}"
        for at, (first, among) in enumerate(pairs, start=1)
    )


def _drafted(drafted: Drafted) -> str:
    """Return, in words and for two temperatures, the tokens per pass, and how often the first 1, 2,
    ... draft tokens are accepted."""
    both = zip((0, 1), drafted.tokens, (drafted.greedy, drafted.sampled), strict=True)
    return "; ".join(
        f"temperature {temperature}: {tokens:.2f} tokens a pass, accepted "
        f"{' '.join(f'{share:.0%}' for share in shares)}"
        for temperature, tokens, shares in both
    )


def _closeness(closeness: Closeness) -> str:
    first, second = closeness.acceptance, closeness.agreement
    return f"acceptance at temperature 1 {first:.1%}, same first choice {second:.1%}"
