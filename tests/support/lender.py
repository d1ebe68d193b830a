"""Hidden-state drafters of the fixtures, and a target that only has an embedding and a head."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlx_specdec.interfaces import Scores
from mlx_specdec.models.drafters.kinds import on_target, read
from mlx_specdec.models.drafters.network import DrafterNetwork
from mlx_specdec.models.number_format import NumberFormat
from mlx_specdec.proposers.hidden_state import HiddenStateDrafter
from mlx_specdec.sampling.noise import SilentNoise
from mlx_specdec.sampling.settings import Sampling

from . import speculators

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
    network = on_target(files, target)
    network.load(files, NumberFormat("float32"))
    return network


class Run:
    """A drafter that is shown one sequence, round after round. hidden: (tokens, taps x width).
    encoded: The encoder's output, (n, width), if the target has an encoder."""

    def __init__(
        self,
        network: DrafterNetwork,
        tokens: Sequence[int],
        hidden: mx.array,
        encoded: mx.array | None = None,
    ) -> None:
        vocabulary = network._target.vocabulary
        # At a temperature there are rows; without noise the likeliest token is drawn.
        self._proposer = HiddenStateDrafter(network, Sampling(temperature=1.0), vocabulary)
        self._proposer.begin([[1]])
        self._tokens, self._hidden, self._seen = list(tokens), hidden, 0
        self._encoded = () if encoded is None else (encoded[None],)

    def draft(self, length: int, count: int) -> tuple[list[int], mx.array]:
        """Return `count` draft tokens after the first `length` tokens, and their rows."""
        taps = self._proposer.taps
        parts = mx.split(self._hidden[None, self._seen : length - 1], len(taps), axis=-1)
        hidden = dict(zip(taps, parts, strict=True))
        shown = Scores(mx.zeros((1, 1, 1)), hidden, self._encoded)
        self._proposer.observe([self._tokens[self._seen : length - 1]], [shown])
        self._seen = length - 1
        proposal = self._proposer.propose([self._tokens[:length]], count, SilentNoise())
        assert proposal.rows is not None
        [drafted] = proposal.tokens.tolist()
        return drafted, proposal.rows[0]

    def chances(self) -> mx.array:
        """Return the acceptance probabilities of the last draft's tokens."""
        report = self._proposer._reading.chances()
        assert report is not None
        return report[0]


def drafts_of(directory: Path, seed: int = 1, length: int = 12, count: int = 3) -> mx.array:
    """Return the logits of `count` tokens after a random text."""
    keys = mx.random.split(mx.random.key(seed), 3)
    embedding = mx.random.normal((speculators.VOCABULARY, speculators.WIDTH), key=keys[0])
    network = network_of(directory, Lender(embedding))
    width = len(network.taps) * speculators.WIDTH
    tokens = mx.random.randint(0, speculators.VOCABULARY, (length,), key=keys[1]).tolist()
    hidden = mx.random.normal((length, width), key=keys[2])
    return Run(network, tokens, hidden).draft(length, count)[1]  # type: ignore[arg-type]


def differ(one: mx.array, another: mx.array) -> bool:
    finite = mx.isfinite(one)
    return bool(mx.max(mx.abs(mx.where(finite, one - another, 0))).item() > 1e-3)  # type: ignore[operator]
