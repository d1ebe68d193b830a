"""The settings of a training, checked before any model is loaded. Imports no MLX."""

from dataclasses import dataclass
from typing import Literal

from ..errors import OptionError

MOST_DRAFTED = 32
"""In a round, that a drafter learns. Of longer ones hardly any is accepted to the end."""


@dataclass(frozen=True)
class DataConfig:
    """Which texts are learned from. samples: most texts. length: tokens of one, prompt included (of
    the continuation alone for encoder-decoder models). self_distill: the model continues the
    prompts itself, `texts_at_once` in one pass, as many at each of the `temperatures`."""

    samples: int = 500
    length: int = 256
    self_distill: bool = True
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    seed: int = 0
    texts_at_once: int = 16

    def __post_init__(self) -> None:
        _at_least(self, samples=2, length=8, texts_at_once=1, seed=0)
        if not self.temperatures:
            raise OptionError("temperature needs one number or more, separated by commas")
        for temperature in self.temperatures:
            if not 0 <= temperature < float("inf"):
                raise OptionError(f"temperature must be 0 or more, not {temperature}")


@dataclass(frozen=True)
class TrainConfig:
    """How anything learns. batch: what one step sees. patience: epochs without progress on held-out
    texts that end the training. The learning rate rises over the first `warm_up` of all steps, then
    falls as a cosine."""

    batch: int = 256
    epochs: int = 20
    learning_rate: float = 1e-3
    warm_up: float = 0.05
    patience: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, batch=1, epochs=1, patience=1, seed=0)
        if not 0 < self.learning_rate < 1:
            raise OptionError(f"learning-rate must lie between 0 and 1, not {self.learning_rate}")


@dataclass(frozen=True)
class HeadsConfig(TrainConfig):
    """What heads are, and how they learn. own_output: an output layer for each, from which the
    base's is the start; else the base's own. batch: hidden states of one step."""

    heads: int = 3
    layers: int = 1
    own_output: bool = False

    def __post_init__(self) -> None:
        for name, value, most in (("heads", self.heads, 16), ("layers", self.layers, 4)):
            if not 1 <= value <= most:
                raise OptionError(f"{name} must be 1 to {most}, not {value}")
        super().__post_init__()


@dataclass(frozen=True)
class DistillConfig(TrainConfig):
    """How a draft learns its target's distribution. batch: texts of one step. divergence: what is
    minimized: forward is KL(target || draft), reverse the other way round, jsd between, tvd the
    rejected share itself."""

    batch: int = 8
    learning_rate: float = 5e-4
    divergence: Literal["forward", "reverse", "jsd", "tvd"] = "forward"


@dataclass(frozen=True)
class DrafterConfig(TrainConfig):
    """What a drafter on hidden states is, and how it learns. batch: texts of one step. layers: the
    transformer layers of one that drafts blocks; None: by the target's depth. num_draft: how many
    tokens it learns to draft in a round."""

    kind: Literal["dspark", "eagle3"] = "dspark"
    batch: int = 8
    learning_rate: float = 1e-3
    layers: int | None = None
    num_draft: int = 6

    def __post_init__(self) -> None:
        _at_least(self, layers=1)
        if not 1 <= self.num_draft <= MOST_DRAFTED:
            raise OptionError(f"num-draft must be 1 to {MOST_DRAFTED}, not {self.num_draft}")
        super().__post_init__()


@dataclass(frozen=True)
class DraftConfig:
    """A draft to begin with where there is none. layers: how many, of the target's own, evenly
    chosen. width: of hidden states; all weights are then random, and have to be learned."""

    layers: int
    width: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, layers=1, width=1)


def _at_least(config: object, **bounds: int) -> None:
    for name, least in bounds.items():
        value = getattr(config, name)
        if value is not None and value < least:
            raise OptionError(f"{name.replace('_', '-')} must be {least} or more, not {value}")
