"""The settings of a training run, checked before any model is loaded. Imports no MLX."""

from dataclasses import dataclass

from .. import OptionError

LONGEST_LEARNED = 32
"""Largest draft length that a drafter can learn. Longer drafts are hardly ever accepted whole."""


@dataclass(frozen=True)
class DataConfig:
    """The texts to train on.

    Attributes:
        samples: The largest number of texts.
        length: The most tokens of a sequence; for encoder-decoder models the most tokens of the
            prompt and of the completion.
        self_distill: Whether the target model generates the completions.
        temperatures: Sampling temperatures of these completions, each used equally often.
    """

    samples: int = 500
    length: int = 256
    self_distill: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, samples=2, length=8, seed=0)


@dataclass(frozen=True)
class TrainConfig:
    """How a draft model is trained, and the settings that all training runs share.

    Attributes:
        batch: The number of examples in a step, which are sequences.
        learning_rate: The highest learning rate. It falls along a cosine after the warm-up.
        warm_up: The share of all steps during which the learning rate rises linearly.
        patience: Training ends after this many epochs without progress on held-out examples.
        layers: The number of evenly spaced layers of the target that a new draft model begins with;
            None trains the draft of the pair.
    """

    batch: int = 8
    epochs: int = 20
    learning_rate: float = 5e-4
    warm_up: float = 0.05
    patience: int = 2
    seed: int = 0
    layers: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, batch=1, epochs=1, patience=1, seed=0, layers=1)
        if not 0 < self.learning_rate < 1:
            raise OptionError(f"learning-rate must lie between 0 and 1, not {self.learning_rate}")


@dataclass(frozen=True)
class HeadsConfig(TrainConfig):
    """The shape of Medusa heads, and how they are trained. A batch counts hidden states.

    own_output: Whether every head gets an output layer, which begins as the base model's. If not,
    all heads use the base model's output layer.
    """

    batch: int = 256
    learning_rate: float = 1e-3
    layers: int = 1
    heads: int = 3
    own_output: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (("heads", self.heads, 16), ("layers", self.layers, 4)):
            if not 1 <= value <= most:
                raise OptionError(f"{name} must be 1 to {most}, not {value}")
        super().__post_init__()


@dataclass(frozen=True)
class DrafterConfig(TrainConfig):
    """The shape of a DSpark, and how it is trained. layers: The number of layers; None derives it
    from the target's depth. num_draft: The draft length for which the drafter is trained."""

    learning_rate: float = 1e-3
    num_draft: int = 6

    def __post_init__(self) -> None:
        if not 1 <= self.num_draft <= LONGEST_LEARNED:
            raise OptionError(f"num-draft must be 1 to {LONGEST_LEARNED}, not {self.num_draft}")
        super().__post_init__()


def _at_least(config: object, **bounds: int) -> None:
    for name, least in bounds.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise OptionError(f"{name.replace('_', '-')} must be {least} or more, not {value}")
