"""What both families of models promise beyond contracts.Model, so that heads can sit on them.

Knows names only.
"""

from __future__ import annotations

from typing import Protocol

import mlx.core as mx

from ..contracts import Model


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
