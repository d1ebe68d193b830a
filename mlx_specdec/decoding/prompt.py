"""The prompt is read in chunks, each of them one step of decoding.

So progress, cancelling and interleaving with other sequences have one place. The newest committed
token stays unseen: the first round feeds it.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ..contracts import Context, Progress, Proposer

CHUNK = 512
"""Tokens in one pass over the prompt; more only costs memory."""


class PromptReader:
    """Feeds a target's context the prefix of one sequence, and a proposer what the target saw.

    prefix: `Model.prefix` of the prompt. prompt: what `Proposer.begin` is told. progress: counts
    tokens of the prompt. step_size: tokens in one pass, CHUNK where it is None.
    """

    def __init__(
        self,
        target: Context,
        prefix: Sequence[int],
        prompt: Sequence[int],
        proposer: Proposer | None = None,
        progress: Progress | None = None,
        step_size: int | None = None,
    ) -> None:
        self._target = target
        self._prefix = list(prefix[:-1])
        self._prompt = prompt
        self._proposer = proposer
        self._progress = progress
        self._step_size = step_size or CHUNK
        self._read = 0
        self.done = False

    def step(self) -> None:
        """Read one chunk and wait for it; an encoder reads its source with the first one."""
        if self._read == 0:
            self._report(0)
            if self._proposer is not None:
                self._proposer.begin(self._prompt)
        chunk = self._prefix[self._read : self._read + self._step_size]
        if chunk:
            self._feed(chunk)
        self._target.evaluate()
        self._read += len(chunk)
        self.done = self._read == len(self._prefix)
        self._report(len(self._prompt) if self.done else self._read)

    def _feed(self, chunk: list[int]) -> None:
        taps = self._proposer.taps if self._proposer is not None else ()
        scores = self._target.advance(mx.array([chunk], dtype=mx.int32), taps=taps)
        if self._proposer is not None:
            self._proposer.observe([chunk], [scores])

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(tokens, len(self._prompt))
