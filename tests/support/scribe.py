"""A hidden-state drafter that records its inputs."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.core.proposer import Setup
from mlx_specdec.models.drafters.network import DrafterContext
from mlx_specdec.models.rows import Rows
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.types import Noise, Proposal, Scores

from .rows import row_of


class Drawn:
    """Random numbers for many sequences at once. Separate keys would take seconds."""

    def __init__(self, generator: np.random.Generator, count: int, symbols: int) -> None:
        self._generator, self._count, self._symbols = generator, count, symbols

    def accept(self, count: int) -> mx.array:
        return mx.array(self._generator.random((self._count, count), np.float32))

    def correction(self) -> mx.array:
        return mx.array(
            self._generator.gumbel(size=(self._count, self._symbols)).astype(np.float32)
        )


SIZE = 8
SILENT = SilentNoise()


class Scribe:
    """A network whose favorite is the token after the newest; both states of a row are its token's
    number, the second one negative."""

    kind, hidden, most, nbytes = "scribe", ("after.1", "after.0"), 5, 1
    batched, inputs, input_dtype = True, 2, mx.float32

    def __init__(self) -> None:
        self.opened: list[Notes] = []

    def open(self, count: int = 1) -> "Notes":
        self.opened.append(Notes(self, count))
        return self.opened[-1]

    def caches(self, rows: Rows) -> list[Any]:
        return []


class Notes(DrafterContext):
    """Notes of what was processed.

    Attributes:
        rows: (token, the one after it) of all hidden states of the only row.
        passes: How many rows each pass had."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rows: list[tuple[int, int]] = []
        self.passes: list[int] = []

    def _process(self, hidden: mx.array, following: Sequence[Sequence[int]]) -> None:
        tokens = self._advance(following)
        assert hidden.shape == (1, tokens.shape[1], 2)
        assert mx.array_equal(hidden[..., 0], -hidden[..., 1]), "in the order of the hidden"
        self.passes.append(tokens.shape[1])
        for state, after in zip(hidden[0, :, 0].tolist(), following[0], strict=True):
            self.rows.append((int(state), after))

    def _begin(self, hidden: mx.array, following: Sequence[Sequence[int]], count: int) -> mx.array:
        self._process(hidden, following)
        return self._likes(self.rows[-1][1])

    def next_logits(self, tokens: mx.array) -> mx.array:
        self._rows.advance(tokens, 1)
        return self._likes(int(tokens.item()))

    def _likes(self, token: int) -> mx.array:
        return 3.0 * (mx.arange(SIZE) == (token + 1) % SIZE)[None, None].astype(mx.float32)


class Shown:
    """A row of a proposer with this network, whose hidden states are shown to it."""

    def __init__(self, network: Scribe, proposer: HiddenStateDrafter, **settings) -> None:
        self.network, self.proposer = network, proposer
        self.row = row_of([1, 2, 3], SIZE, Options(**settings))

    @property
    def notes(self) -> Notes:
        """What the network noted."""
        [notes] = self.network.opened
        return notes

    def see(self, tokens: list[int]) -> None:
        self.row.seen = tokens
        self.row.processed += len(tokens)
        self.row.committed = self.row.committed[: self.row.processed - len(tokens)] + tokens
        states = mx.array([[[float(token)] for token in tokens]])
        hidden = {"after.1": states, "after.0": -states}
        self.proposer.observe([self.row], Scores(mx.zeros((1, len(tokens), SIZE)), hidden))

    def propose(self, committed: list[int], limit: int, noise: Noise = SILENT) -> Proposal:
        self.row.committed = committed
        return self.proposer.propose([self.row], [limit], noise)

    def drafted(self, committed: list[int], limit: int) -> list[int]:
        [tokens] = self.propose(committed, limit).tokens.tolist()
        return tokens


def begun(network: Scribe | None = None, prices=None, eager: bool = True, **settings) -> Shown:
    network = network or Scribe()
    setup = Setup(eager=lambda: eager, prices=lambda rows: prices and prices())
    proposer = HiddenStateDrafter(network, setup)
    return Shown(network, proposer, **settings)
