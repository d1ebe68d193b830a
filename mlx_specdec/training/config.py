"""The settings of a training run, checked before any model is loaded. Imports no MLX."""

from dataclasses import dataclass

from .. import OptionError

LONGEST_LEARNED = 32
"""Largest draft length that a drafter can learn. Longer drafts are hardly ever accepted whole."""


@dataclass(frozen=True)
class TrainConfig:
    """How a draft model is trained, and the settings that all training runs share.

    Attributes:
        samples: The largest number of texts to train on.
        length: The most tokens of a sequence; for encoder-decoder models the most tokens of the
            prompt and of the completion.
        self_distill: Whether the target model generates the completions.
        batch: The number of examples in a step, which are sequences.
        learning_rate: The highest learning rate.
        layers: The number of evenly spaced layers of the target that a new draft model begins with;
            None trains the draft of the pair.
    """

    samples: int = 500
    length: int = 256
    self_distill: bool = True
    batch: int = 8
    epochs: int = 20
    learning_rate: float = 5e-4
    layers: int | None = None

    def __post_init__(self) -> None:
        _check(self, samples=(2, None), length=(8, None), batch=(1, None), epochs=(1, None))
        _check(self, layers=(1, None))
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
        _check(self, heads=(1, 16), layers=(1, 4))
        super().__post_init__()


@dataclass(frozen=True)
class DrafterConfig(TrainConfig):
    """The shape of a DSpark, and how it is trained. layers: The number of layers; None derives it
    from the target's depth. num_draft: The draft length for which the drafter is trained."""

    learning_rate: float = 1e-3
    num_draft: int = 6

    def __post_init__(self) -> None:
        _check(self, num_draft=(1, LONGEST_LEARNED))
        super().__post_init__()


def _check(config: object, **bounds: tuple[int, int | None]) -> None:
    for name, (least, most) in bounds.items():
        value = getattr(config, name)
        if value is not None and not least <= value <= (most or value):
            limits = f"{least} or more" if most is None else f"{least} to {most}"
            raise OptionError(f"{name.replace('_', '-')} must be {limits}, not {value}")
