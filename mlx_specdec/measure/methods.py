"""Runs the methods of a benchmark alternately, so that drifts affect all of them alike."""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Literal, TypeVar

from ..core.options import Options
from ..engine.drafters import FREE, drafters
from ..engine.generate import stream_generate
from ..engine.pair import Pair
from ..engine.request import proposer_kind
from ..errors import OptionError, PromptError
from ..models.base import check_prompt
from ..results import Statistics
from ..text.prompts import Prompt
from ..types import Progress, ignore_progress

Length = int | Literal["auto"]
Runner = Callable[[Sequence[int]], "Sample"]
T = TypeVar("T")
Key = tuple[int, int]
"""The number of a case, and the number of its repeat."""


@dataclass(frozen=True)
class Sample:
    """One output of one method. `seconds` cover `counted` tokens, since other programs generate the
    first token in their prefill. `rounds` includes plain steps, and is None if a program does not
    report it. Only this package's methods have `stats`."""

    tokens: tuple[int, ...]
    counted: int
    seconds: float
    rounds: int | None = None
    text: str = ""
    stats: Statistics | None = None


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        family: The proposer ("plain", "draft", "ngram"), or another program ("mlx-lm").
        same_text: Whether the tokens must equal the tokens of plain decoding.
    """

    name: str
    family: str
    num_draft: Length
    same_text: bool
    run: Runner


@dataclass(frozen=True)
class Case:
    """One sequence to generate: the number of a prompt in the file, and of a turn of the prompt."""

    prompt: int
    turn: int
    category: str | None


@dataclass
class Measurements:
    """The samples of a benchmark, by the method's name. Plain decoding is the first method.

    Attributes:
        skipped: Why a model cannot take a prompt, by the number of the case.
    """

    methods: Sequence[Method]
    cases: Sequence[Case]
    samples: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def plain(self) -> Mapping[Key, Sample]:
        """The samples of plain decoding."""
        return self.samples[self.methods[0].name]


def own_methods(
    pairs: Sequence[Pair], options: Options, proposers: Sequence[str], lengths: Sequence[Length]
) -> list[Method]:
    """Return plain decoding, then every length of every proposer. Raises OptionError if no pair has
    one of the proposers.

    Args:
        pairs: One target with each of the drafts to compare.
        proposers: The names of proposers. If there are none, every pair uses its draft, its heads
            or lookup, and also the default of `generate` if "auto" is among the lengths.
    """
    # The chat template has been applied: methods receive token ids.
    options = replace(options, system_prompt=None, chat_template_config={})
    compared: list[tuple[Pair, str, Length]] = [
        (pair, proposer, length)
        for pair, proposer in _compared(pairs, options, proposers)
        for length in lengths
    ]
    if not proposers and "auto" in lengths:
        compared += [(pair, "auto", "auto") for pair in pairs if _default(pair, options) != FREE]
    names = ["auto" if name == n else f"{name} {n}" for _, name, n in compared]
    methods = [Method("plain", "plain", 0, True, _runner(pairs[0], replace(options, regular=True)))]
    for name, (pair, proposer, length) in zip(names, compared, strict=True):
        drafting = replace(options, regular=False, proposer=proposer, num_draft=length)
        methods.append(
            Method(
                name=name if names.count(name) == 1 else f"{name}, {pair.draft_name}",
                family=proposer_kind(drafters(pair, drafting)),
                num_draft=length,
                same_text=keeps_text(drafting),
                run=_runner(pair, drafting),
            )
        )
    return methods


def _default(pair: Pair, options: Options) -> str:
    chosen = drafters(pair, replace(options, num_draft=1, proposer=None))
    return chosen[0].name if chosen else FREE


def _compared(
    pairs: Sequence[Pair], options: Options, proposers: Sequence[str]
) -> list[tuple[Pair, str]]:
    """Combine every proposer with all pairs, without repeating a drafter. Raises OptionError if no
    pair has a proposer."""
    if not proposers:
        return [(pair, _default(pair, options)) for pair in pairs]
    compared: dict[object, tuple[Pair, str]] = {}
    for proposer in proposers:
        missing: list[OptionError] = []
        for pair in pairs:
            try:
                chosen = drafters(pair, replace(options, num_draft=1, proposer=proposer))
            except OptionError as problem:
                missing.append(problem)
            else:
                key = (proposer, *((drafter.name, drafter.identity) for drafter in chosen))
                compared.setdefault(key, (pair, proposer))
        if len(missing) == len(pairs):
            raise missing[0]
    return list(compared.values())


def keeps_text(options: Options) -> bool:
    """Return whether not only the distribution but also the tokens must equal plain decoding."""
    if options.lossy:
        return False
    return options.temperature == 0 or options.rule_name == "coupled"


def room(pair: Pair, options: Options, prompt: Sequence[int]) -> int:
    """Return the maximum number of tokens to generate. Raises PromptError if there is no room."""
    longest = pair.target.max_length
    check_prompt(prompt, pair.target.vocabulary, longest)
    prefix = len(pair.target.prefix(prompt))
    if longest is not None and prefix >= longest:
        raise PromptError(f"the prompt has {prefix} tokens and the model takes {longest}")
    return min(options.max_tokens, sys.maxsize if longest is None else longest - prefix)


def _runner(pair: Pair, options: Options) -> Runner:
    def run(prompt: Sequence[int]) -> Sample:
        made = stream_generate(pair, prompt, options).result()
        tokens, stats = made.tokens, made.stats
        return Sample(tokens, len(tokens), stats.seconds.decoding, stats.rounds, made.text, stats)

    return run


def measure(
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    encode: Callable[[str], Sequence[int]],
    *,
    repeats: int = 3,
    progress: Progress = ignore_progress,
) -> Measurements:
    """Run every method on every prompt, and return the samples. The first output of each method
    does not count. Ctrl-C ends it early. Raises PromptError if no prompt can be used.

    Args:
        methods: The methods. The first one is plain decoding, which answers earlier turns.
        encode: Returns the token ids of a prompt.
        repeats: The number of samples of each case by each method.
        progress: Receives the number of completed outputs.
    """
    cases = [
        Case(number, turn, prompt.category)
        for number, prompt in enumerate(prompts)
        for turn in range(len(prompt.turns))
    ]
    measured = Measurements(methods, cases, {method.name: {} for method in methods})
    answers: dict[tuple[int, int], str] = {}
    total = len(methods) * (1 + repeats * len(cases))
    counter = count()

    @functools.cache
    def ids(index: int) -> Sequence[int]:
        """Encode a turn, after the earlier turns and the answers of plain decoding."""
        case = cases[index]
        *earlier, last = prompts[case.prompt].turns[: case.turn + 1]
        talk = ((text, answers.get((case.prompt, turn), "")) for turn, text in enumerate(earlier))
        return encode("\n\n".join([*chain.from_iterable(talk), last]))

    def run(index: int, repeat: int, method: Method) -> None:
        try:
            sample = method.run(ids(index))
        except PromptError as problem:
            measured.skipped[index] = str(problem)
            for name, samples in measured.samples.items():
                left = {key: sample for key, sample in samples.items() if key[0] != index}
                measured.samples[name] = left
            return
        measured.samples[method.name][index, repeat] = sample
        if method is methods[0]:
            answers.setdefault((cases[index].prompt, cases[index].turn), sample.text)

    progress(next(counter), total)
    try:
        for method in methods:
            # An unusable prompt is reported and skipped later.
            with suppress(PromptError):
                method.run(ids(0))
            progress(next(counter), total)
        for repeat in range(repeats):
            for index in range(len(cases)):
                for method in turned(methods, index + repeat):
                    if index not in measured.skipped:
                        run(index, repeat, method)
                    progress(next(counter), total)
    except KeyboardInterrupt:
        measured.interrupted = True
    if len(measured.skipped) == len(cases):
        raise PromptError(f"no prompt can be measured; the first: {measured.skipped[0]}")
    return measured


def turned(methods: Sequence[T], by: int) -> list[T]:
    """Return the list, rotated to the left by `by` items."""
    first = by % len(methods) if methods else 0
    return [*methods[first:], *methods[:first]]
