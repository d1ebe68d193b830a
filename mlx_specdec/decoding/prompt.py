"""Reads prompts in chunks, each of them one step of decoding, so that progress, cancelling and
interleaving with other sequences happen in one place.

The newest committed token stays unseen: the first round feeds it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import mlx.core as mx

from ..interfaces import Context, Progress, Proposer, feed
from ..interfaces.reusable import Cached

CHUNK = 512
"""Tokens in one pass over the prompt on a CPU, where larger ones take longer and more memory."""
LARGE_CHUNK = 2048
"""On an accelerator, as mlx-lm has it."""
ROOM = 4 << 30
"""Bytes that must be free for it: attention that is not fused writes 2 GB of scores for 32 heads in
half precision at 16,000 tokens."""


def chunk(prompts: int) -> int:
    """Return how many tokens of each of so many prompts one pass reads on this machine."""
    if mx.default_device() == mx.Device(mx.cpu):
        return CHUNK
    room = int(mx.device_info().get("memory_size", 0)) - mx.get_active_memory()
    return LARGE_CHUNK if room >= prompts * ROOM else CHUNK


class PromptReader:
    """Feeds a target's context the prefixes of its sequences, and a proposer what the target saw.

    target: may have been opened with the beginning of a prefix, which is then not read. prefixes:
    `Model.prefix` of each prompt. prompts: for `Proposer.begin`. progress: counts tokens of the
    longest prompt. step_size: tokens of each in one pass; None takes `chunk`. cached: what the
    proposer may recall, per sequence.
    """

    def __init__(
        self,
        target: Context,
        prefixes: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        proposer: Proposer | None = None,
        progress: Progress | None = None,
        step_size: int | None = None,
        cached: Sequence[Mapping[str, Cached]] = (),
    ) -> None:
        self._target = target
        self._cached = cached
        self._known = target.lengths
        self._prefixes = [
            prefix[seen:-1] for prefix, seen in zip(prefixes, self._known, strict=True)
        ]
        self._prompts = prompts
        self._proposer = proposer
        self._progress = progress
        self._step_size = step_size or chunk(len(prompts))
        self._read = 0
        self.begun = False
        self.done = False

    @property
    def left(self) -> int:
        """How many tokens of the longest prefix are still to be read."""
        return max(map(len, self._prefixes)) - self._read

    def step(self) -> None:
        """Read one chunk and wait for it; an encoder reads its source with the first one."""
        if not self.begun:
            self.begun = True
            self._report(min(self._known))
            if self._proposer is not None:
                if any(self._known) or any(self._cached):
                    self._proposer.recall(self._known, self._cached)
                self._proposer.begin(self._prompts)
        upto = self._read + self._step_size
        chunks = [list(prefix[self._read : upto]) for prefix in self._prefixes]
        if any(chunks):
            self._feed(chunks)
        self._target.evaluate()
        self._read += max(map(len, chunks))
        self.done = self._read >= max(map(len, self._prefixes))
        whole = max(map(len, self._prompts))
        self._report(whole if self.done else min(self._known) + self._read)

    def filter(self, keep: Sequence[int]) -> None:
        """Keep these sequences, in this order; the first chunk has been read."""
        self._prefixes = [self._prefixes[row] for row in keep]
        self._prompts = [self._prompts[row] for row in keep]

    def _feed(self, chunks: list[list[int]]) -> None:
        taps = self._proposer.taps if self._proposer is not None else ()
        scores = feed(self._target, chunks, taps)
        if self._proposer is not None:
            each = [scores.of(row, len(tokens)) for row, tokens in enumerate(chunks)]
            self._proposer.observe(chunks, each)

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(tokens, max(map(len, self._prompts)))
