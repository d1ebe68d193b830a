"""Training of a DSpark at many anchors of a sequence in one pass. An anchor is a row of the
sequence at which a draft begins. A query attends to the rows of its sequence before its anchor, and
to the draft tokens of the same anchor."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..models.base import Ids
from ..models.drafters.dflash import DFlash
from ..models.drafters.layers import DrafterAttention, Source
from ..models.encoder_decoder.context import EncoderDecoderModel
from ..types import rectangle
from .config import DrafterConfig
from .fit import Task, Training


def _from_blocks(
    attention: DrafterAttention, context: mx.array, anchors: mx.array, rows: mx.array
) -> mx.array:
    """Attend from the draft tokens of all anchors.

    Args:
        context: The rows of the sequences, (sequences, rows, width).
        anchors: The number of rows that each anchor attends to, (sequences, anchors) int32.
        rows: The draft tokens, (sequences, anchors x slots, width).
    """
    (sequences, count), slots = anchors.shape, rows.shape[1] // anchors.shape[1]
    blocks, offsets = rows.reshape(-1, slots, rows.shape[-1]), anchors.reshape(-1)

    def by_sequence(heads: mx.array) -> mx.array:
        """(sequences x anchors, heads, slots, n) -> (sequences, heads, anchors x slots, n)"""
        parts = heads.reshape(sequences, count, -1, slots, heads.shape[-1]).swapaxes(1, 2)
        return parts.reshape(sequences, -1, count * slots, heads.shape[-1])

    pairs = zip(attention.keys_values(context), attention.keys_values(blocks, offsets), strict=True)
    keys, values = (mx.concatenate([all, by_sequence(own)], axis=2) for all, own in pairs)
    before = mx.arange(context.shape[1]) < mx.repeat(anchors, slots, axis=1)[..., None]
    anchor = mx.arange(count * slots) // slots
    own = mx.repeat((anchor[:, None] == anchor)[None], sequences, axis=0)
    mask = mx.concatenate([before, own], axis=-1)[:, None]
    queries = by_sequence(attention.queries(blocks, offsets))
    return attention.attend(queries, keys, values, mask)


GAMMA = 4.0
"""Number of draft tokens over which the loss weight falls to 1 / e."""
SPACING = 4
"""Number of tokens per anchor. Every epoch draws new anchors."""


@dataclass(frozen=True)
class Drafted:
    """Estimated acceptance of drafts in held-out sequences, if the sequences are what is generated.

    Attributes:
        loss: The loss that training minimizes.
        greedy: For each draft length 1, 2, ..., the share of the anchors at which the whole draft
            is accepted at temperature 0.
        sampled: The shares under speculative sampling at temperature 1 (Leviathan et al., arXiv
            2211.17192, corollary 3.6).
    """

    loss: float
    greedy: tuple[float, ...]
    sampled: tuple[float, ...]

    @property
    def tokens(self) -> tuple[float, float]:
        """Tokens per target pass at temperatures 0 and 1, the bonus token included."""
        return 1 + sum(self.greedy), 1 + sum(self.sampled)

    @property
    def score(self) -> float:
        return -sum(self.tokens)

    def describe(self) -> str:
        """Return, in words and for two temperatures, the tokens per pass, and how often the first
        1, 2, ... draft tokens are accepted."""
        both = zip((0, 1), self.tokens, (self.greedy, self.sampled), strict=True)
        return "; ".join(
            f"temperature {temperature}: {tokens:.2f} tokens a pass, accepted "
            f"{' '.join(f'{share:.0%}' for share in shares)}"
            for temperature, tokens, shares in both
        )


class Anchored:
    """A batch of padded sequences. Padding contributes nothing to the loss.

    Attributes:
        hidden: The target's hidden states, (sequences, rows, number of hidden states x width).
        anchors: The number of rows that each anchor attends to, (sequences, anchors) int32.
        tokens: The token at each anchor and the tokens after it, (sequences, anchors, slots) int32.
        wanted: Indices into the flattened `tokens` after which a token is drafted, (n,) int32.
        logits: The target's logits at the distinct rows of `wanted`, (m, vocabulary).
        which: The row in `logits` of each index in `wanted`, (n,) int32.
        encoded: The encoder's output of the prompts, (sequences, n, width), and the mask of their
            tokens, (sequences, 1, 1, n) bool; empty if the target has no encoder.
    """

    def __init__(self, *arrays: mx.array) -> None:
        self.hidden, self.anchors, self.tokens, self.wanted, self.logits, self.which = arrays[:6]
        self.encoded = arrays[6:]

    @property
    def slots(self) -> int:
        return self.tokens.shape[2]

    def chosen(self, rows: mx.array) -> mx.array:
        """Select the entries at `wanted`: (sequences, anchors x slots, ...) -> (n, ...)."""
        return rows.reshape(-1, *rows.shape[2:])[self.wanted]


class DSparkTask(Task):
    """The training task of a DSpark with its Markov head and its confidence head, whose examples
    are samples. Drafts begin at random anchors of the completion."""

    def __init__(self, network: DFlash, training: Training, config: DrafterConfig) -> None:
        super().__init__(network, training, config)
        self.network, rows = network, self._rows
        # The number of leading rows whose next token belongs to the prompt.
        self._leads = np.array([len(self._base.prefix(prompt)) - 1 for prompt in self._prompts])
        self._starts, self._lengths = rows.starts, rows.lengths.astype(np.int64)
        self._tokens = rows.tokens()
        self._slots = config.num_draft

    def ordered(self, examples: np.ndarray) -> np.ndarray:
        return examples[np.argsort(self._lengths[examples], kind="stable")]

    def count(self, examples: np.ndarray) -> int:
        return int((self._lengths - self._leads)[examples].sum())

    def take(self, examples: np.ndarray, chance: np.random.Generator) -> tuple[mx.array, ...]:
        """Return the arrays of `Anchored`."""
        starts, lengths = self._starts[examples], self._lengths[examples]
        places = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
        rows = starts[:, None] + places
        states = self._rows.states(rows.reshape(-1)).reshape(*rows.shape, -1)
        hidden, final = mx.split(states, [states.shape[-1] - self._base.width], axis=-1)
        anchors, some = self._anchors(examples, chance)
        slots = anchors[..., None] + np.arange(self._slots)
        inside = some[..., None] & (slots < lengths[:, None, None])
        slots = np.minimum(slots, lengths[:, None, None] - 1)
        # A row stores the token after it, so the input token of a row is stored one row earlier.
        tokens = self._tokens[starts[:, None, None] + slots - 1]
        wanted = np.flatnonzero(inside)
        predicting = slots + np.arange(len(examples))[:, None, None] * rows.shape[1]
        unique, which = np.unique(predicting.reshape(-1)[wanted], return_inverse=True)
        final_states = final.reshape(-1, final.shape[-1])[mx.array(unique.astype(np.int32))]
        logits = self._base.head(final_states[None])[0, :, : self._vocabulary]
        numbers = (anchors, tokens, wanted, which)
        arrays = [mx.array(array.astype(np.int32)) for array in numbers]
        encoded = self._encoded([self._prompts[sample] for sample in examples])
        return hidden.astype(mx.float32), *arrays[:3], logits, arrays[3], *encoded

    def loss(self, *batch: mx.array) -> mx.array:
        """Return the mean cross-entropy with the target's distribution at temperature 1, plus the
        loss of the confidence head, which learns the acceptance probability."""
        anchored = Anchored(*batch)
        states, before = self._states(anchored)
        entropy, accepted = self._compared(anchored, self._logits(states, before))
        tokens = anchored.chosen(anchored.tokens.reshape(anchored.tokens.shape[0], -1))
        embedded = self.network.markov_head.markov_w1(tokens)
        inputs = mx.stop_gradient(states), mx.stop_gradient(embedded)
        sure = self.network.confidence(*inputs)
        return self._averaged(anchored, entropy) + nn.losses.binary_cross_entropy(sure, accepted)

    def draft(self, anchored: Anchored) -> mx.array:
        """Return the drafter's logits after each token of `wanted`, (n, vocabulary)."""
        return self._logits(*self._states(anchored))

    def _logits(self, states: mx.array, before: mx.array) -> mx.array:
        network = self.network
        logits = network.own_logits(states[None])[0].astype(mx.float32)
        return (logits + network.markov_head.markov_w2(before))[:, : self._vocabulary]

    def _states(self, anchored: Anchored) -> tuple[mx.array, mx.array]:
        """Return the inputs of the output head, (n, width), and of `markov_w2`, (n, rank)."""
        states = self._blocks(anchored)
        blocks = states.reshape(-1, anchored.slots, states.shape[-1])
        tokens = anchored.tokens.reshape(-1, anchored.slots)
        latents, carried = [], None
        for slot in range(anchored.slots):
            at = tokens[:, slot : slot + 1], blocks[:, slot : slot + 1]
            latent, carried = self.network.markov_head.latent(*at, carried)
            latents.append(latent)
        before = mx.concatenate(latents, axis=1).reshape(*states.shape[:2], -1)
        return anchored.chosen(states), anchored.chosen(before)

    def _blocks(self, anchored: Anchored) -> mx.array:
        """Return the output of the final norm, (sequences, anchors x slots, width)."""
        network, slots = self.network, anchored.slots
        first = mx.arange(slots) == 0
        tokens = mx.where(first, anchored.tokens, network.mask_token)
        tokens = tokens.reshape(tokens.shape[0], -1)
        context = network.features(anchored.hidden)
        states = mx.stop_gradient(network.embed(tokens))
        for layer, source in zip(network.layers, self._sources(anchored), strict=True):
            attend = partial(_from_blocks, layer.self_attn, context, anchored.anchors)
            states = layer(states, attend, source)
        return network.norm(states)

    def sums(self, *batch: mx.array) -> mx.array:
        """Return sums over the anchors, shape (4, slots).

        The first row is the mean loss times the number of anchors. The next two rows are the drafts
        accepted up to this slot at temperatures 0 and 1. The last row is the number of anchors.
        """
        anchored = Anchored(*batch)
        draft = self.draft(anchored)
        entropy, accepted = self._compared(anchored, draft)
        first = mx.argmax(draft, axis=-1)
        agreeing = first == mx.argmax(anchored.logits, axis=-1)[anchored.which]
        ones = mx.ones(anchored.wanted.shape)
        by_slot = [self._by_anchor(anchored, values) for values in (agreeing, accepted, ones)]
        count = by_slot[2].sum(axis=0)
        shares = [mx.cumprod(values, axis=1).sum(axis=0) for values in by_slot[:2]]
        return mx.stack([self._averaged(anchored, entropy) * count, *shares, count])

    def figures(self, total: mx.array) -> Drafted:
        lost, greedy, sampled, count = np.array(total)
        count = np.maximum(count, 1)
        shares = ((part / count).round(4).tolist() for part in (greedy, sampled))
        return Drafted(float(lost[0] / count[0]), *map(tuple, shares))

    def _encoded(self, prompts: Sequence[Ids]) -> tuple[mx.array, ...]:
        if not isinstance(self._base, EncoderDecoderModel):
            return ()
        lengths = mx.array([len(prompt) for prompt in prompts])
        mask = mx.arange(max(map(len, prompts))) < lengths[:, None, None, None]
        return self._base.network.encode(rectangle(prompts), mask), mask

    def _sources(self, anchored: Anchored) -> list[Source]:
        """Return each layer's keys and values of the encoder's output, or None."""
        projected = self.network.project_encoded(anchored.encoded[0]) if anchored.encoded else ()
        if not projected:
            return [None] * len(self.network.layers)
        pairs = zip(projected[::2], projected[1::2], strict=True)
        return [(keys, values, anchored.encoded[1]) for keys, values in pairs]

    def _anchors(
        self, examples: np.ndarray, chance: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draw anchors in the completions. Return the number of rows before each anchor, and a mask
        that is false for padding, both (sequences, anchors)."""
        first = self._leads[examples] + 1
        among = self._lengths[examples] - first
        counts = -(-among // SPACING)
        anchors = np.repeat(first[:, None], counts.max(), axis=1)
        for row, (places, count) in enumerate(zip(among, counts, strict=True)):
            anchors[row, :count] += np.sort(chance.choice(places, count, replace=False))
        return anchors, np.arange(counts.max()) < counts[:, None]

    def _compared(self, anchored: Anchored, draft: mx.array) -> tuple[mx.array, mx.array]:
        """Return the cross-entropies with the target's distribution, and the acceptance rates of
        speculative sampling, which carry no gradient, both (n,). draft: The drafter's logits, (n,
        vocabulary)."""
        target = mx.softmax(anchored.logits.astype(mx.float32), axis=-1)[anchored.which]
        log_q = draft - mx.logsumexp(draft, axis=-1, keepdims=True)
        accepted = mx.minimum(target, mx.exp(mx.stop_gradient(log_q))).sum(axis=-1)
        return -(target * log_q).sum(axis=-1), accepted

    def _averaged(self, anchored: Anchored, entropy: mx.array) -> mx.array:
        weights = math.exp(-1 / GAMMA) ** (anchored.wanted % anchored.slots)
        return (weights * entropy).sum() / weights.sum()

    def _by_anchor(self, anchored: Anchored, rows: mx.array) -> mx.array:
        every = mx.zeros((anchored.tokens.size,))
        return every.at[anchored.wanted].add(rows.astype(mx.float32)).reshape(-1, anchored.slots)
