"""What single prompts of many ask for, how far they are, and what they become."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..decoding.margins import DAMAGED
from ..decoding.run import NO_TEXT, Labels, Result
from ..decoding.sequence import Sequence as Decoded
from ..decoding.statistics import Recorder
from ..decoding.stop_criteria import Emission
from ..errors import DecodingError, OptionError, SpecdecError
from ..options import Options
from ..proposers.drafter import Drafter
from ..text.chat import Messages
from .drafters import Trials
from .generate import environment, make_labels, make_rule, make_sequence
from .memory import Extent
from .pair import Pair
from .prepare import checked_options, prepared

Prompt = str | Sequence[int] | Messages
BROKEN = "this text could not go on, since something failed inside"


@dataclass(frozen=True)
class Request:
    """A prompt with settings of its own. prediction: token ids that the text may turn out to have,
    which are drafted where prompts come one by one. top_logprobs: how many of the likeliest tokens
    emissions tell of each position, with their logprobs; None tells nothing. shown: special ids
    that are printed, and how. ignore_eos: what ends a text does not end this one."""

    prompt: Prompt
    options: Options
    prediction: tuple[int, ...] = ()
    top_logprobs: int | None = None
    shown: Mapping[int, str] = field(default_factory=dict)
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Raises OptionError."""
        if self.options is None:
            raise OptionError("a Request needs Options: give the prompt alone to have the others'")
        checked_options(self.options)


@dataclass(frozen=True)
class Part:
    """What one step gave for one prompt.

    number: of the prompt, counted from 0. result: with the last part. error: why there is none.
    """

    number: int
    emission: Emission
    result: Result | None = None
    error: str | None = None

    @property
    def last(self) -> bool:
        """Whether nothing more comes for this prompt."""
        return self.result is not None or self.error is not None


@dataclass
class Failures:
    """A count of the internal failures that ended texts.

    last: the class name of the newest. passes: how many shared passes have failed since the last
    token was generated.
    """

    count: int = 0
    last: str | None = None
    passes: int = 0

    def note(self, problem: Exception) -> str:
        """Count a failure and return the error message for the texts that it ends. Messages of
        other libraries only go into the log, since they may contain paths."""
        self.count += 1
        self.last = type(problem).__name__
        return str(problem) if isinstance(problem, SpecdecError) else f"{BROKEN} ({self.last})"


@dataclass(eq=False)
class Job:
    """A prompt on its way. alike, rule: what it has in common with those that it is read with, and
    with those that it is decoded with. began, read: when its prompt was begun, and had been read.
    cached_tokens: how many of its tokens were not read again. behind: a job with a prompt that
    begins alike and is read before this one.
    """

    pair: Pair
    number: int
    options: Options
    ids: list[int]
    sequence: Decoded
    alike: object
    rule: object
    trials: Trials
    prediction: tuple[int, ...] = ()
    recorder: Recorder = field(default_factory=Recorder)
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0
    read: float = 0.0
    cached_tokens: int = 0
    behind: Job | None = None

    @classmethod
    def of(cls, pair: Pair, number: int, request: Request, chosen: Sequence[Drafter]) -> Job:
        """Of a request that nobody has begun. chosen: who drafts for all. Raises SpecdecError for
        what cannot be read."""
        ids, own, options = prepared(pair, request.prompt, request.options)
        if request.ignore_eos:
            own = replace(own, eos_token_ids=frozenset())
        return cls(
            pair,
            number,
            options,
            ids,
            make_sequence(own, ids, options, request.top_logprobs, request.shown),
            (replace(options, seed=0, max_tokens=1, stop=()), request.prediction),
            _rule_of(options),
            Trials(pair, chosen, options),
            tuple(id for id in request.prediction if 0 <= id < pair.vocabulary),
        )

    @property
    def extent(self) -> Extent:
        """The lengths of its sequence."""
        now = len(self.sequence.committed)
        return Extent(len(self.ids), now, now + self.sequence.remaining)

    def part(
        self, emission: Emission, chosen: Sequence[Drafter], clock: Callable[[], float]
    ) -> Part:
        """What a step has given. chosen: who drafts for all. clock: seconds."""
        self.texts.append(emission.text)
        self.tokens += emission.tokens
        if not self.sequence.ended:
            return Part(self.number, emission)
        try:
            return Part(self.number, emission, self._result(emission, chosen, clock))
        except DecodingError as problem:
            return Part(self.number, emission, error=str(problem))

    def _result(
        self, emission: Emission, chosen: Sequence[Drafter], clock: Callable[[], float]
    ) -> Result:
        if emission.finish_reason is None or emission.finish_reason in NO_TEXT:
            raise DecodingError(NO_TEXT.get(emission.finish_reason, DAMAGED))
        self.trials.tell()
        drafting = chosen if most_drafted(self.options) > 0 else ()
        labels: Labels = make_labels(
            self.pair, self.options, drafting, len(self.ids), self.cached_tokens
        )
        here = environment(self.pair)
        stats = self.recorder.summary(
            load=here.load_seconds,
            prompt=self.read - self.began,
            decoding=clock() - self.read,
            peak_memory_bytes=here.peak_memory(),
            device=here.device,
            blas=here.blas,
        )
        return Result(
            "".join(self.texts), tuple(self.tokens), emission.finish_reason, labels, stats
        )


def most_drafted(options: Options) -> int:
    """The most tokens that may be drafted for a sequence in a round."""
    if options.regular or options.proposer == "none":
        return 0
    return sys.maxsize if options.num_draft == "auto" else options.num_draft


def _rule_of(options: Options) -> object:
    """What sequences of one batch have in common: the rule, which is another one where a greedy
    text draws nothing."""
    rule = type(make_rule(options))
    return rule, options.delta, options.posterior_threshold, options.posterior_alpha
