"""The flags of trainings, in groups. Imports no MLX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..training.config import DataConfig, DistillConfig, DrafterConfig, HeadsConfig
from .flags import REQUIRED, Flags, flag

COLLECTING, DISTILLING, FITTING = DataConfig(), DistillConfig(), HeadsConfig()
DRAFTING = DrafterConfig()


@dataclass(frozen=True)
class TrainingTexts(Flags):
    """What a training learns from."""

    panel = "Data"
    data: Path = flag(
        REQUIRED,
        'A file with one text a line, or JSON lines with "prompt" and maybe "target".',
        metavar="FILE",
    )
    no_self_distill: bool = flag(False, "Learn from the data and not from the model's own text.")
    samples: int = flag(COLLECTING.samples, "The largest number of texts to learn from.")
    length: int = flag(COLLECTING.length, "The number of tokens of a text.")
    temperature: str = flag(
        ",".join(f"{each:g}" for each in COLLECTING.temperatures),
        "The temperatures at which the model writes, as many texts at each.",
        "--temp",
        metavar="NUMBER,...",
    )
    texts_at_once: int = flag(
        COLLECTING.texts_at_once, "The number of texts that the model writes in one pass."
    )

    def collecting(self, seed: int) -> DataConfig:
        """Raises OptionError."""
        return DataConfig(
            samples=self.samples,
            length=self.length,
            self_distill=not self.no_self_distill,
            temperatures=_numbers("temperature", self.temperature),
            seed=seed,
            texts_at_once=self.texts_at_once,
        )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(one) for one in text.split(","))
    except ValueError:
        raise OptionError(
            f"{name} must be numbers with commas between them, not {text!a:.60}"
        ) from None


@dataclass(frozen=True)
class HeadSchedule(Flags):
    """How Medusa heads learn."""

    panel = "Training"
    batch: int = flag(FITTING.batch, "The number of hidden states in one step.")
    epochs: int = flag(FITTING.epochs, "The largest number of passes over the data.")
    learning_rate: float = flag(FITTING.learning_rate, "The highest learning rate.", "--lr")
    patience: int = flag(
        FITTING.patience, "The number of epochs without progress after which training ends."
    )
    seed: int = flag(FITTING.seed, "The seed of the data's order and of new weights.")


@dataclass(frozen=True)
class DraftSchedule(HeadSchedule):
    """How a draft model learns."""

    batch: int | None = flag(  # type: ignore[assignment]
        None,
        "The number of texts in one step.",
        show_default=f"{DISTILLING.batch}; dspark, eagle3 {DRAFTING.batch}",
    )
    learning_rate: float | None = flag(  # type: ignore[assignment]
        None,
        "The highest learning rate.",
        "--lr",
        show_default=f"{DISTILLING.learning_rate}; dspark, eagle3 {DRAFTING.learning_rate}",
    )

    def asked(self) -> dict[str, Any]:
        """What was asked for, by name; the rest is up to the kind."""
        return {name: value for name, value in vars(self).items() if value is not None}
