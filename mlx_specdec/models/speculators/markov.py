"""DSpark's heads: what the token before adds to the logits of the next, and how sure it is.

Source: arXiv 2607.05147. Of Markov heads vanilla looks at that token alone, gated at the slot's
hidden state too, rnn at what it carries through the block as well.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from ...checkpoints.speculators.dflash import CONFIDENCE, CONFIDENCE_BIAS, W1, BlockFiles


class MarkovHead(nn.Module):
    """The head of a directory; named as in files."""

    def __init__(self, files: BlockFiles) -> None:
        super().__init__()
        self._kind = files.markov
        width, (vocabulary, rank) = files.sizes.width, files.tensors.shapes[W1]
        drafted = files.tensors.shapes["markov_head.markov_w2.weight"][0]
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)
        if files.markov == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        if files.markov == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def step(
        self, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """(1, 1) int32, the token before a slot, and the slot's (1, 1, width) -> what is added to
        its logits (1, 1, the drafter's vocabulary), and what the next slot is given as `carried`.
        """
        before, carried = self.latent(token, state, carried)
        return self.markov_w2(before), carried

    def latent(
        self, token: mx.array, state: mx.array, carried: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        """The same before the last matrix, of width `rank`; of many blocks at once."""
        before = self.markov_w1(token)
        if self._kind == "gated":
            gate = mx.sigmoid(self.gate_proj(mx.concatenate([state, before], axis=-1)))
            before = gate * before
        if self._kind == "rnn":
            memory = mx.zeros_like(before) if carried is None else carried
            joint = self.joint_proj(mx.concatenate([memory, before, state], axis=-1))
            gate, candidate, output = mx.split(joint, 3, axis=-1)
            gate = mx.sigmoid(gate)
            carried = gate * memory + (1 - gate) * mx.tanh(candidate)
            before = mx.tanh(output)
        return before, carried


class ConfidenceHead(nn.Module):
    """How likely the target is to take what a slot drafts, if it takes all before; named as in
    files. It may look at the token before, in the Markov head's embedding."""

    def __init__(self, files: BlockFiles) -> None:
        super().__init__()
        inputs = files.tensors.shapes[CONFIDENCE][1]
        self.proj = nn.Linear(inputs, 1, bias=CONFIDENCE_BIAS in files.tensors)
        self._alone = inputs == files.sizes.width

    def logits(self, state: mx.array, before: mx.array | None) -> mx.array:
        """(..., width) of slots, and the embeddings (..., rank) of the tokens before -> (...)
        float32, of which the sigmoid is the chance."""
        told = [state] if self._alone or before is None else [state, before]
        logits: mx.array = self.proj(mx.concatenate(told, axis=-1))
        return logits.astype(mx.float32)[..., 0]
