"""Short trainings of every kind, and a listener that can interrupt them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_specdec.engine.pair import Pair
from mlx_specdec.training import draft, drafter, medusa
from mlx_specdec.training.config import (
    DataConfig,
    DistillConfig,
    DrafterConfig,
    HeadsConfig,
)
from mlx_specdec.training.fit import Trained

TEXTS = {
    "medusa": ["some words", "other words than these", "words again and again", "the last"],
    "draft": [f"{one} {two}" for one in ("some", "other", "more") for two in ("words", "of")],
    # The held-out texts are also trained on, because random models cannot generalize.
    "dspark": ["some words", "other words of"] * 4,
}


class Watcher:
    """A watcher that records progress, and interrupts the training after some samples or steps."""

    def __init__(
        self,
        steps: int | None = None,
        end: Callable[[], object] | None = None,
        *,
        samples: int | None = None,
    ) -> None:
        self._last, self._samples, self._end = steps, samples, end
        self.samples: list[int] = []
        self.steps: list[int] = []
        self.losses: list[float] = []
        self.epochs: list[tuple[int, Any]] = []

    def collected(self, done: int, total: int) -> None:
        self.samples.append(done)
        if done == self._samples:
            raise KeyboardInterrupt

    def stepped(self, done: int, total: int, loss: float) -> None:
        self.steps.append(done)
        self.losses.append(loss)
        if done == self._last:
            if self._end is not None:
                self._end()
            raise KeyboardInterrupt

    def measured(self, epoch: int, figures: Any) -> None:
        self.epochs.append((epoch, figures))


def output_of(kind: str, directory: Path) -> Path:
    """Where `trained` writes."""
    return directory / {"medusa": "heads", "draft": "draft"}.get(kind, "drafter")


def trained(
    kind: str,
    pair: Pair,
    directory: Path,
    watcher: Watcher | None = None,
    *,
    texts: Sequence[str] | None = None,
    **changes: Any,
) -> Trained:
    """Train in a directory. changes: Of the settings."""
    directory.mkdir(exist_ok=True)
    file, output = directory / "texts", output_of(kind, directory)
    file.write_text("\n".join(texts or TEXTS[kind]))
    watcher = watcher or Watcher()
    if kind == "medusa":
        heads = HeadsConfig(**{"heads": 2, "epochs": 2, "batch": 16, **changes})
        return medusa.train(pair, file, output, DataConfig(length=48), heads, watcher)
    usual = {"batch": 2, "learning_rate": 0.01, "patience": 6}
    if kind == "draft":
        config = DistillConfig(**{**usual, "epochs": 6, **changes})
        return draft.train(pair, file, output, DataConfig(length=24), config, watcher)
    hidden = DrafterConfig(**{**usual, "epochs": 5, "num_draft": 3, **changes})
    data = DataConfig(length=16, temperatures=(0.0,))
    return drafter.train(pair, file, output, data, hidden, watcher)


def weights(directory: Path) -> dict[str, mx.array]:
    """Return the weights of a training's result."""
    [file] = directory.glob("*.safetensors")
    return dict(mx.load(str(file)))
