"""Attention of many drafts at once, each behind its own anchor of a text. A query sees the rows of
its text before its anchor, and whatever stands behind the same anchor."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..interfaces import rectangle
from ..models.base import Base
from ..models.drafters.files import Shapes
from ..models.drafters.layers import Attention, Source
from ..models.drafters.network import DrafterNetwork
from ..models.encoder_decoder.context import EncoderDecoderModel
from ..models.trainable import Ids
from .config import DrafterConfig
from .fit import TextTask, Training

KeysValues = tuple[mx.array, mx.array]


def attend(
    attention: Attention, queries: mx.array, seen: KeysValues, own: KeysValues, anchors: mx.array
) -> mx.array:
    """-> (texts, anchors x m, width).

    queries: (texts x anchors, heads, m, head_dim). seen: keys and values of the texts' rows,
    (texts, kv_heads, rows, head_dim) each. own: of what stands behind each anchor, (texts x
    anchors, kv_heads, k, head_dim). anchors: (texts, anchors) int32, how many rows each sees."""
    (texts, count), (keys, values) = anchors.shape, own
    together, heads, slots, depth = queries.shape
    kv_heads, rows = keys.shape[1], seen[0].shape[2]
    groups = heads // kv_heads
    by_anchor = (together, kv_heads, groups * slots)
    by_text = (texts, kv_heads, groups * count * slots)

    queries = queries.reshape(*by_anchor, depth) * depth**-0.5
    inside = _by_text(queries @ keys.swapaxes(-1, -2), count, groups)
    before = _by_text(queries, count, groups).reshape(*by_text, depth) @ seen[0].swapaxes(-1, -2)
    before = before.reshape(*inside.shape[:-1], rows)
    hidden = mx.arange(rows) >= anchors[:, None, None, :, None, None]
    scores = mx.concatenate([mx.where(hidden, -mx.inf, before), inside], axis=-1)
    before, inside = mx.split(mx.softmax(scores, axis=-1), [rows], axis=-1)
    mixed = _by_anchor(
        (before.reshape(*by_text, rows) @ seen[1]).reshape(*inside.shape[:-1], depth)
    )
    mixed = mixed + _by_anchor(inside) @ values

    by_slot = mixed.reshape(texts, count, heads, slots, depth).swapaxes(2, 3)
    return attention.o_proj(by_slot.reshape(texts, count * slots, heads * depth))


def _by_text(array: mx.array, count: int, groups: int) -> mx.array:
    """(texts x anchors, kv_heads, groups x m, n) -> (texts, kv_heads, groups, anchors, m, n)."""
    together, kv_heads, rows, width = array.shape
    parts = array.reshape(together // count, count, kv_heads, groups, rows // groups, width)
    return parts.transpose(0, 2, 3, 1, 4, 5)


def _by_anchor(array: mx.array) -> mx.array:
    texts, kv_heads, groups, count, slots, width = array.shape
    return array.transpose(0, 3, 1, 2, 4, 5).reshape(texts * count, kv_heads, groups * slots, width)


SPACING = 4
"""Tokens of a text for one anchor: others are drawn in every epoch."""


@dataclass(frozen=True)
class Drafted:
    """What would be accepted of drafts in held-out texts, as far as their own tokens tell. loss:
    what is minimized. greedy, sampled: at temperatures 0 and 1, share of the anchors behind which
    the first 1, 2, ... tokens are accepted. The second is what speculative sampling accepts
    (Leviathan et al., arXiv 2211.17192, corollary 3.6)."""

    loss: float
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    @property
    def tokens(self) -> tuple[float, float]:
        """A target's pass, its own token included, at both temperatures."""
        return 1 + sum(self.greedy), 1 + sum(self.sampled)

    @property
    def score(self) -> float:
        return -sum(self.tokens)


class Anchored:
    """One batch, texts side by side; what is padded counts nowhere.

    hidden: (texts, rows, taps x width), of the target. following: (texts, rows) int32, the token
    after each row. anchors: (texts, anchors) int32, how many rows each may look at. tokens: (texts,
    anchors, slots) int32, the anchor itself and those behind it. wanted: (n,) int32, places in the
    flattened `tokens` behind which something is drafted. logits: (m, vocabulary), the target's.
    which: (n,) int32, the one among them for each that is wanted. encoded: what the target's
    encoder made of the texts' sources, (texts, n, width), and where they have tokens, (texts, n)
    bool; empty where it has none."""

    def __init__(self, *arrays: mx.array) -> None:
        self.hidden, self.following, self.anchors, self.tokens = arrays[:4]
        self.wanted, self.logits, self.which = arrays[4:7]
        self.encoded = arrays[7:]

    @property
    def slots(self) -> int:
        return self.tokens.shape[2]

    def chosen(self, rows: mx.array) -> mx.array:
        """(texts, anchors x slots, ...) -> (n, ...), of what is wanted."""
        return rows.reshape(-1, *rows.shape[2:])[self.wanted]


class AnchorTask(TextTask):
    """Task of a drafter on hidden states."""

    decay: float
    """A token counts so much less than the one before it."""

    def __init__(self, network: DrafterNetwork, training: Training, config: DrafterConfig) -> None:
        super().__init__(network, training, config)
        self.network, rows = network, self._rows
        # Rows that only predict what the prompt says.
        self._leads = np.array([len(self._base.prefix(prompt)) - 1 for prompt in self._prompts])
        self._starts, self._lengths = rows.starts, rows.lengths.astype(np.int64)
        self._tokens = rows.tokens()
        self._slots = config.num_draft
        ids = network.target_ids
        self._ids = None if ids is None else mx.array(ids, dtype=mx.int32)

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        return examples[np.argsort(self._lengths[examples], kind="stable")]

    def count(self, examples: np.ndarray) -> int:
        return int((self._lengths - self._leads)[examples].sum())

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """The arrays of `Anchored`."""
        starts, lengths = self._starts[examples], self._lengths[examples]
        places = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        rows = starts[:, None] + places
        states = self._rows.states(rows.reshape(-1)).reshape(*rows.shape, -1)
        hidden, final = mx.split(states, [states.shape[-1] - self._base.width], axis=-1)
        anchors, some = self._anchors(examples, chance)
        slots = anchors[..., None] + np.arange(self._slots)
        inside = some[..., None] & (slots < lengths[:, None, None])
        slots = np.minimum(slots, lengths[:, None, None] - 1)
        following = self._tokens[rows]
        # The token that a row is about stands behind the anchor's own.
        tokens = self._tokens[starts[:, None, None] + slots - 1]
        wanted = np.flatnonzero(inside)
        predicting = slots + np.arange(len(examples))[:, None, None] * rows.shape[1]
        unique, which = np.unique(predicting.reshape(-1)[wanted], return_inverse=True)
        seen = final.reshape(-1, final.shape[-1])[mx.array(unique.astype(np.int32))]
        logits = self._base.head(seen[None])[0, :, : self._vocabulary]
        numbers = (following, anchors, tokens, wanted, which)
        arrays = [mx.array(each.astype(np.int32)) for each in numbers]
        encoded = self._encoded([self._prompts[sample] for sample in examples])
        return hidden.astype(mx.float32), *arrays[:4], logits, arrays[4], *encoded

    def loss(self, *batch: mx.array) -> mx.array:
        """Cross-entropy with the target's distribution at temperature 1, averaged."""
        given = Anchored(*batch)
        entropy, _ = compared(self.draft(given), self._probabilities(given))
        return self._averaged(given, entropy)

    def sums(self, *batch: mx.array) -> mx.array:
        """(4, slots): the loss in all of them, accepted at temperature 0 and 1, and anchors."""
        given = Anchored(*batch)
        draft = self.draft(given)
        entropy, accepted = compared(draft, self._probabilities(given))
        first = mx.argmax(draft, axis=-1)
        first = first if self._ids is None else self._ids[first]
        agreeing = first == mx.argmax(given.logits, axis=-1)[given.which]
        ones = mx.ones(given.wanted.shape)
        by_slot = [self._by_anchor(given, each) for each in (agreeing, accepted, ones)]
        count = by_slot[2].sum(axis=0)
        shares = [mx.cumprod(each, axis=1).sum(axis=0) for each in by_slot[:2]]
        return mx.stack([self._averaged(given, entropy) * count, *shares, count])

    def figures(self, total: mx.array) -> Drafted:
        lost, greedy, sampled, count = np.array(total)
        count = np.maximum(count, 1)
        shares = ((part / count).round(4).tolist() for part in (greedy, sampled))
        return Drafted(float(lost[0] / count[0]), *map(tuple, shares))

    @classmethod
    def zeros(cls, config: Mapping[str, Any], target: Base) -> Shapes:
        """Return the tensors that are zero at first."""
        return {}

    @classmethod
    def file_name(cls, path: str) -> str:
        """Return the name of a parameter in files."""
        return path

    @abstractmethod
    def draft(self, given: Anchored) -> mx.array:
        """Logits (n, the drafter's vocabulary) of the tokens behind those that are wanted."""

    def _encoded(self, prompts: Sequence[Ids]) -> tuple[mx.array, ...]:
        if not isinstance(self._base, EncoderDecoderModel):
            return ()
        lengths = mx.array([len(prompt) for prompt in prompts])
        mask = mx.arange(max(map(len, prompts))) < lengths[:, None]
        return self._base.network.encode(rectangle(prompts), mask), mask

    def _sources(self, given: Anchored) -> list[Source | None]:
        """Per layer what it sees of the sources."""
        layers = self.network.layers
        return self.network.sources(*given.encoded) if given.encoded else [None] * len(layers)

    def _anchors(
        self, examples: np.ndarray, chance: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """(texts, anchors): rows before the anchor, and whether it is one. The first that may be
        one is the first token that the target writes."""
        first = self._leads[examples] + 1
        among = self._lengths[examples] - first
        counts = -(-among // SPACING)
        anchors = np.repeat(first[:, None], counts.max(), axis=1)
        for row, (places, count) in enumerate(zip(among, counts, strict=True)):
            anchors[row, :count] += np.sort(chance.choice(places, count, replace=False))
        return anchors, np.arange(counts.max()) < counts[:, None]

    def _probabilities(self, given: Anchored) -> mx.array:
        """(n, the drafter's vocabulary): the target's, without those of tokens that it lacks."""
        p = mx.softmax(given.logits.astype(mx.float32), axis=-1)
        return (p if self._ids is None else p[:, self._ids])[given.which]

    def _averaged(self, given: Anchored, entropy: mx.array) -> mx.array:
        weights = self.decay ** (given.wanted % given.slots)
        return (weights * entropy).sum() / weights.sum()

    def _by_anchor(self, given: Anchored, rows: mx.array) -> mx.array:
        every = mx.zeros((given.tokens.size,))
        return every.at[given.wanted].add(rows.astype(mx.float32)).reshape(-1, given.slots)


def compared(draft: mx.array, target: mx.array) -> tuple[mx.array, mx.array]:
    """(n, vocabulary) logits and the target's probabilities -> (n,) cross-entropies, and the shares
    that speculative sampling accepts, which have no gradient here."""
    log_q = draft - mx.logsumexp(draft, axis=-1, keepdims=True)
    accepted = mx.minimum(target, mx.exp(mx.stop_gradient(log_q))).sum(axis=-1)
    return -(target * log_q).sum(axis=-1), accepted
