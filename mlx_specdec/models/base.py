"""What both families of models promise beyond contracts.TargetModel: their modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..contracts import TargetModel

BatchPass = Callable[[mx.array], mx.array]
"""Sees the next tokens of several texts, (batch, m) int32, and gives (batch, m, vocabulary)
logits."""


class Base(TargetModel, Protocol):
    """A loaded model with its modules."""

    @property
    def network(self) -> nn.Module:
        """The modules, whose parameters are named as in checkpoints."""
        ...

    @property
    def rows_agree(self) -> bool:
        """Whether a pass over several rows means what passes over single rows mean, which
        speculation rests on. Where not, a RuntimeWarning says so once."""
        ...

    def open_batch(self, prompts: Sequence[Sequence[int]]) -> BatchPass:
        """Texts that begin together, of which nothing has been seen but an encoder's sources.

        Nothing of them can be taken back. What to feed is `prefix` of each prompt, and what
        follows. Raises PromptError as `open` does.
        """
        ...
