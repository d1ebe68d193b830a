"""One generation from the reader's side: an iterator of emissions, and the result at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .. import process as threads
from ..draft_length.length import Change
from ..errors import DecodingError
from .loop import Decoding
from .margins import DAMAGED
from .statistics import Recorder, Statistics
from .stop_criteria import Emission, FinishReason

STUCK = (
    "the text cannot go on as json-schema, regex or grammar demands: the model has no token for "
    "what must follow, logit-bias bans it, or the grammar is too complex; make it simpler"
)
NO_TEXT: dict[FinishReason | None, str] = {"damaged": DAMAGED, "stuck": STUCK}
"""Why there is no text, by the reason for which it ended."""


@dataclass(frozen=True)
class Labels:
    """How one generation is named in its result."""

    model: str
    draft_model: str | None
    proposer: str
    rule: str
    lossy: bool
    delta: float
    seed: int
    num_draft: int | str
    prompt_tokens: int
    cached_tokens: int = 0
    simulated_acceptance: float | None = None


@dataclass(frozen=True)
class Result:
    """A finished text. tokens: ids, an EOS included; text: without EOS and stop strings."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    labels: Labels
    stats: Statistics

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        labels = self.labels
        simulated = labels.simulated_acceptance
        # Nobody should take for text what only measured the loop.
        mark = {} if simulated is None else {"simulated_acceptance": simulated}
        return {
            **mark,
            "text": self.text if simulated is None else None,
            "tokens": list(self.tokens) if simulated is None else None,
            "finish_reason": self.finish_reason,
            "prompt_tokens": labels.prompt_tokens,
            "cached_tokens": labels.cached_tokens,
            "generated_tokens": len(self.tokens),
            "model": labels.model,
            "draft_model": labels.draft_model,
            "proposer": labels.proposer,
            "rule": labels.rule,
            "lossy": labels.lossy,
            "delta": labels.delta,
            "seed": labels.seed,
            "num_draft": labels.num_draft,
            "stats": self.stats.as_dict(),
        }


@dataclass(frozen=True)
class Environment:
    """What the figures are measured on. peak_memory: called at the end, bytes."""

    load_seconds: float
    device: str
    blas: str
    peak_memory: Callable[[], int]


class Run:
    """Iterate to decode; `result` finishes what is left and returns everything.

    clock: seconds. learned: called once, after the last emission. changes: of the draft length.
    keep: called when the prompt was read, and after the last emission, to keep what was computed.
    forget: called when decoding fails, since what was kept may be damaged.
    """

    def __init__(
        self,
        decoding: Decoding,
        recorder: Recorder,
        labels: Labels,
        environment: Environment,
        clock: Callable[[], float],
        learned: Callable[[], None] | None = None,
        changes: Callable[[], Sequence[Change]] | None = None,
        keep: Callable[[], None] = lambda: None,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        self._decoding = decoding
        self._recorder = recorder
        self._labels = labels
        self._environment = environment
        self._clock = clock
        self._learned = learned
        self._changes = changes
        self._keep_computed = keep
        self._forget = forget
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._reason: FinishReason | None = None
        self._started = self._read_at = self._ended_at = clock()

    def __iter__(self) -> Iterator[Emission]:
        """The emissions still to come, one a step; those of the prompt's steps are empty."""
        threads.clear_at_end()
        while self._reason is None:
            reading = self._decoding.reading
            try:
                [emission] = self._decoding.step()
                if reading and not self._decoding.reading:
                    self._keep_computed()
                self._keep(emission, reading)
            except DecodingError:
                self._forget()
                raise
            yield emission

    def read_prompt(self) -> None:
        """Read the prompt and nothing more; iterating does so by itself."""
        while self._reason is None and self._decoding.reading:
            next(iter(self))

    @property
    def changes(self) -> Sequence[Change]:
        """When which number of drafted tokens was chosen; empty where it was fixed."""
        return () if self._changes is None else self._changes()

    def interrupt(self) -> Emission:
        """End the text here; what was emitted stays and counts."""
        [emission] = self._decoding.finish("interrupted")
        return self._keep(emission, self._decoding.reading)

    def result(self) -> Result:
        """Everything, decoded to the end."""
        for _ in self:
            pass
        assert self._reason is not None
        if self._learned is not None:
            self._learned()
            self._learned = None
            self._keep_computed()
        environment = self._environment
        stats = self._recorder.summary(
            load=environment.load_seconds,
            prompt=self._read_at - self._started,
            decoding=self._ended_at - self._read_at,
            peak_memory_bytes=environment.peak_memory(),
            device=environment.device,
            blas=environment.blas,
        )
        return Result("".join(self._texts), tuple(self._tokens), self._reason, self._labels, stats)

    def _keep(self, emission: Emission, reading: bool) -> Emission:
        if emission.finish_reason in NO_TEXT:
            raise DecodingError(NO_TEXT[emission.finish_reason])
        self._texts.append(emission.text)
        self._tokens += emission.tokens
        self._reason = emission.finish_reason
        self._ended_at = self._clock()
        if reading:
            self._read_at = self._ended_at
        return emission
