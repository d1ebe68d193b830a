"""What both families of models promise beyond contracts.TargetModel, and refuse alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from ..contracts import TargetModel
from ..errors import PromptError, RewindError

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

    def caution(self, prompt_tokens: int) -> str:
        """What a user should know before a prompt of this length is read; mostly nothing."""
        ...

    def open_batch(self, prompts: Sequence[Sequence[int]]) -> BatchPass:
        """Texts that begin together, of which nothing has been seen but an encoder's sources.

        Nothing of them can be taken back. What to feed is `prefix` of each prompt, and what
        follows. Raises PromptError as `open` does.
        """
        ...


def check_prompt(prompt: Sequence[int], vocabulary: int, longest: int | None) -> None:
    """Raises PromptError for what `contracts.Model.open` refuses."""
    if not prompt:
        raise PromptError("the prompt is empty: give at least one token")
    if longest is not None and len(prompt) > longest:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens and the model takes {longest}: shorten it"
        )
    # MLX reads past the embedding table without a word.
    strange = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if strange is not None:
        raise PromptError(
            f"token id {strange} of the prompt is not among the model's {vocabulary}: the "
            "tokenizer belongs to another model"
        )


def count_rows(tokens: mx.array, proposed: int) -> int:
    """How many rows a pass over one sequence has. Raises ValueError."""
    if tokens.ndim != 2 or tokens.shape[0] != 1:
        raise ValueError(
            f"a context holds one sequence, tokens of shape (1, m); these have {tokens.shape}"
        )
    rows = tokens.shape[1]
    if rows < 1 or not 0 <= proposed <= rows:
        raise ValueError(f"{proposed} proposed of {rows} tokens: need 0 <= proposed <= m, m >= 1")
    return rows


def check_rewind(lengths: tuple[int, ...], final: int, seen: int) -> int:
    """The length to go back to. Raises RewindError."""
    if len(lengths) != 1:
        raise RewindError(f"this context holds one sequence and {len(lengths)} lengths came")
    if not final <= lengths[0] <= seen:
        raise RewindError(
            f"cannot go to {lengths[0]} tokens: {seen} were seen and {final} are final"
        )
    return lengths[0]
