"""What both families of models promise beyond contracts.Model, so that heads can sit on them.

Knows names only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx

from ..contracts import Model

BatchPass = Callable[[mx.array], mx.array]
"""Sees the next tokens of several texts, (batch, m) int32, and gives (batch, m, vocabulary)
logits."""


class Base(Model, Protocol):
    """A model whose output head can be applied to hidden states of one's own."""

    @property
    def width(self) -> int:
        """Width of the hidden state "final"."""
        ...

    @property
    def state_dtype(self) -> mx.Dtype:
        """Of the hidden state "final"."""
        ...

    def head(self, states: mx.array) -> mx.array:
        """(batch, m, width), as "final" is -> logits (batch, m, vocabulary)."""
        ...

    def open_batch(self, prompts: Sequence[Sequence[int]]) -> BatchPass:
        """Texts that begin together, of which nothing has been seen but an encoder's sources.

        Nothing of them can be taken back. What to feed is `prefix` of each prompt, and what
        follows. Raises PromptError as `open` does.
        """
        ...
