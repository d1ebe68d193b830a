"""The constraint that closes a thought at its budget. Imports no MLX."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..text.thoughts import Thoughts
from .constraint import Constraint, Masks


@dataclass(eq=False)
class ThoughtBudget:
    """A constraint that forces the end mark of a thought, in one sequence. `Constraint` documents
    the methods.

    Attributes:
        thoughts: The thoughts of the committed tokens.
        size: The number of token ids.
        grammar: Another constraint of the sequence, or None. If it forbids the mark at the
            position at which the budget ends, it decides alone.
    """

    thoughts: Thoughts
    size: int
    grammar: Constraint | None = None

    @property
    def stuck(self) -> bool:
        return self.grammar is not None and self.grammar.stuck

    @property
    def complete(self) -> bool:
        return self.grammar is not None and self.grammar.complete

    def idle(self, count: int) -> bool:
        return self.grammar is None and self.thoughts.never_forced(count)

    def take(self, tokens: Sequence[int]) -> int:
        count = len(tokens) if self.grammar is None else self.grammar.take(tokens)
        self.thoughts = self.thoughts.after(tokens[:count])
        return count

    def verifiable(self, drafted: Sequence[int]) -> int:
        """See `Constraint`. If a draft token differs from the forced one, the tokens after it are
        dropped. They would be rejected, unless `grammar` forbids the forced token."""
        count = len(drafted) if self.grammar is None else self.grammar.verifiable(drafted)
        thoughts = self.thoughts
        for at, token in enumerate(drafted[:count]):
            if thoughts.forced not in (None, token):
                return at + 1
            thoughts = thoughts.after([token])
        return count

    def masks(self, drafted: Sequence[int]) -> Masks:
        if self.grammar is None:
            rows = np.ones((len(drafted) + 1, self.size), bool)
        else:
            rows = self.grammar.masks(drafted)
        thoughts = self.thoughts
        for at, row in enumerate(rows):
            if (token := thoughts.forced) is not None and row[token]:
                row[:] = False
                row[token] = True
            if at < len(drafted):
                thoughts = thoughts.after([drafted[at]])
        return rows
