"""Hidden-state drafters of the fixtures, and a target that only has an embedding and a head."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlx_specdec.core.noise import SilentNoise
from mlx_specdec.core.options import Options
from mlx_specdec.models.drafters.kinds import kind_named, read
from mlx_specdec.models.drafters.network import DrafterNetwork
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.types import Scores

from . import speculators
from .rows import row_of

FIXTURES = Path(__file__).parents[1] / "fixtures" / "drafters"
LIMIT = 1e-4


class Lender:
    """A target that has nothing but an embedding and a head."""

    width, state_dtype, layers = speculators.WIDTH, mx.float32, 8

    def __init__(self, embedding: mx.array, head: mx.array | None = None) -> None:
        self.vocabulary, self.width = embedding.shape
        self._embedding = embedding
        self._head = embedding if head is None else head

    def embed(self, tokens: mx.array) -> mx.array:
        return self._embedding[tokens]

    def head(self, states: mx.array) -> mx.array:
        return states @ self._head.T


def network_of(directory: Path, target: Lender) -> DrafterNetwork:
    files = read(directory)
    assert files is not None
    network = kind_named(files.kind)(files)
    network.bind(files, target)
    network.load(files, NumberFormat("float32"))
    return network


class Run:
    """A drafter that is shown one sequence, round after round. hidden: (tokens, states x width).
    encoded: The encoder's output, (n, width), if the target has an encoder."""

    def __init__(
        self,
        network: DrafterNetwork,
        tokens: Sequence[int],
        hidden: mx.array,
        encoded: mx.array | None = None,
    ) -> None:
        # Above temperature 0 there is log q; without noise the most likely token is drawn.
        self._row = row_of([], network._target.vocabulary, Options(temperature=1.0))
        self._proposer = HiddenStateDrafter(network)
        self._tokens, self._hidden = list(tokens), hidden
        self._encoded = () if encoded is None else (encoded[None],)

    def draft(self, length: int, count: int) -> tuple[list[int], mx.array]:
        """Return `count` draft tokens after the first `length` tokens, and their rows."""
        row, names = self._row, self._proposer.hidden
        row.seen, row.processed = self._tokens[row.processed : length - 1], length - 1
        row.committed = self._tokens[:length]
        part = self._hidden[None, row.processed - len(row.seen) : row.processed]
        hidden = dict(zip(names, mx.split(part, len(names), axis=-1), strict=True))
        self._proposer.observe([row], Scores(mx.zeros((1, 1, 1)), hidden, self._encoded))
        proposal = self._proposer.propose([row], [count], SilentNoise())
        assert proposal.rows is not None
        [drafted] = proposal.tokens.tolist()
        return drafted, proposal.rows[0]

    def chances(self) -> mx.array:
        """Return the acceptance probabilities of the last draft's tokens."""
        report = self._row.state[self._proposer.kind].context.chances()
        assert report is not None
        return report[0]


def drafts_of(directory: Path, seed: int = 1, length: int = 12, count: int = 3) -> mx.array:
    """Return the logits of `count` tokens after a random text."""
    keys = mx.random.split(mx.random.key(seed), 3)
    embedding = mx.random.normal((speculators.VOCABULARY, speculators.WIDTH), key=keys[0])
    network = network_of(directory, Lender(embedding))
    width = len(network.hidden) * speculators.WIDTH
    tokens = mx.random.randint(0, speculators.VOCABULARY, (length,), key=keys[1]).tolist()
    hidden = mx.random.normal((length, width), key=keys[2])
    return Run(network, tokens, hidden).draft(length, count)[1]  # type: ignore[arg-type]


def differ(one: mx.array, another: mx.array) -> bool:
    finite = mx.isfinite(one)
    return bool(mx.max(mx.abs(mx.where(finite, one - another, 0))).item() > 1e-3)  # type: ignore[operator]
