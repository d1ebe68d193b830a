"""Accept while equal: greedy matching at temperature 0, coupled sampling above it; lenient greedy.

The target makes its own choice at every position, argmax(log p + g), and drafted tokens stay while
they equal it. What is emitted is always the target's choice: it is exact for every draft.
Source of the coupling: Daliri, Musco, Suresh, arXiv 2408.07978, section 3 (Gumbel).
"""

from __future__ import annotations

import math

import mlx.core as mx

from ..contracts import Noise, Proposal, Verdict
from ..sampling.choices import choose
from .chain import entries, leading, row_after


class Coupled:
    """Exact at every temperature. Reads no proposal rows."""

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """As contracts.Rule says; `noise.target` is the noise that the draft was drawn with."""
        gumbel = noise.target(proposal.size + 1)
        scored = log_p if gumbel is None else log_p + gumbel
        choice = choose(scored, None)
        if proposal.size == 0:
            # A plain step: each operation less is time that plain decoding does not lose.
            return Verdict(proposal.none_kept, choice.squeeze(1), scored)
        kept = leading(choice[:, : proposal.size] == proposal.tokens)
        return Verdict(kept, row_after(choice, kept), scored)


class LenientGreedy:
    """Temperature 0 with delta > 0. Lossy: accepts x iff p(x) >= (1 - delta) max p.

    p is the softmax at temperature 1 of the penalised logits. delta = 0 is greedy matching,
    delta = 1 accepts everything that is not banned, and acceptance never decreases with delta. A
    reading of Leviathan et al., arXiv 2211.17192, appendix A.5, with 1 - delta for its l.
    """

    def __init__(self, delta: float) -> None:
        self._slack = math.log1p(-delta) if delta < 1 else -math.inf

    def verify(self, log_p: mx.array, proposal: Proposal, noise: Noise) -> Verdict:
        """As contracts.Rule says; draws nothing."""
        choice = choose(log_p, None)
        rows = log_p[:, : proposal.size]
        drafted = entries(rows, proposal.tokens, -mx.inf).astype(mx.float32)
        best = mx.max(rows, axis=-1).astype(mx.float32)
        accepted = (drafted >= best + self._slack) & (drafted > -mx.inf)
        kept = leading(accepted | (choice[:, : proposal.size] == proposal.tokens))
        return Verdict(kept, row_after(choice, kept), log_p)
