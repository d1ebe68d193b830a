"""Runs the methods of a benchmark alternately, so that drifts affect all of them alike. A method
decodes one prompt at a time, or all prompts of a file in batches."""

import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Literal

import mlx.core as mx

from ..core.options import Options
from ..engine.drafters import FREE, drafters, proposer_kind
from ..engine.generate import stream_many
from ..engine.pair import Pair
from ..engine.request import encode
from ..errors import DecodingError, OptionError, PromptError
from ..models.base import check_prompt
from ..results import Statistics
from ..text.prompts import Prompt
from ..types import Progress

Length = int | Literal["auto"]
Prompts = Sequence[Sequence[int]]
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


Texts = Iterator[tuple[int, Sample]]
"""Yields the index and the sample of each prompt when it is complete."""


@dataclass(frozen=True)
class Method:
    """One way to decode.

    Attributes:
        family: The proposer ("plain", "draft", "ngram"), or another program ("mlx-lm").
        same_text: Whether the tokens must equal the tokens of plain decoding.
        run: Decodes prompts.
        batch_size: The batch size if the method gets all prompts of a file at once. It is then
            timed with the prefill, and the seconds of its samples are ignored.
    """

    name: str
    family: str
    num_draft: Length
    same_text: bool
    run: Callable[[Prompts], Texts]
    batch_size: int | None = None


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
        peak_memory: The peak memory in bytes, including the weights, by the method's name.
    """

    methods: Sequence[Method]
    cases: Sequence[Case]
    samples: dict[str, dict[Key, Sample]] = field(default_factory=dict)
    skipped: dict[int, str] = field(default_factory=dict)
    peak_memory: dict[str, int] = field(default_factory=dict)
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
    plain = functools.partial(_decoded, pairs[0], replace(options, regular=True), 1)
    methods = [Method("plain", "plain", 0, True, plain)]
    for name, (pair, proposer, length) in zip(names, compared, strict=True):
        drafting = replace(options, regular=False, proposer=proposer, num_draft=length)
        methods.append(
            Method(
                name=name if names.count(name) == 1 else f"{name}, {pair.draft_name}",
                family=proposer_kind(drafters(pair, drafting)),
                num_draft=length,
                same_text=keeps_text(drafting),
                run=functools.partial(_decoded, pair, drafting, 1),
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
    return not options.lossy and (options.temperature == 0 or options.rule_name == "coupled")


def encoded(pair: Pair, options: Options, text: str) -> list[int]:
    """Return the token ids of a prompt. Raises PromptError if there is no room for a completion."""
    ids, longest = encode(pair, text, options), pair.target.max_length
    check_prompt(ids, pair.target.vocabulary, longest)
    prefix = len(pair.target.prefix(ids))
    if longest is not None and prefix >= longest:
        raise PromptError(f"the prompt has {prefix} tokens and the model takes {longest}")
    return ids


def file_methods(
    pair: Pair, options: Options, proposer: str | None, length: Length, sizes: Sequence[int]
) -> tuple[list[Method], list[str]]:
    """Return plain and speculative decoding of a file at all batch sizes, and plain decoding at
    batch size 1.

    Also return notes on models that cannot decode several sequences at once. Raises OptionError if
    the pair does not have the proposer.
    """
    options = replace(options, system_prompt=None, chat_template_config={})
    plain = replace(options, regular=True)
    drafting = replace(options, regular=False, proposer=proposer, num_draft=length)
    kind = proposer_kind(drafters(pair, drafting))
    name = "auto" if kind == length else f"{kind} {length}"
    methods, reasons = [], []
    for size in sorted({1, *sizes}):
        compared: list[tuple[str, str, Length, Options]] = [("plain", "plain", 0, plain)]
        compared += [(name, kind, length, drafting)] if size in sizes else []
        for label, family, n, how in compared:
            label, run = f"{label}, batch {size}", functools.partial(_decoded, pair, how, size)
            methods.append(Method(label, family, n, keeps_text(how), run, size))
            if size > 1 and (why := stream_many(pair, [], how, batch_size=size).why_not):
                reasons.append(why)
    return methods, [f"texts were made in turns: {why}" for why in dict.fromkeys(reasons)]


def _decoded(pair: Pair, options: Options, size: int, prompts: Prompts) -> Texts:
    """Decode prompts with a batch size."""
    for part in stream_many(pair, prompts, options, batch_size=size):
        if part.error is not None:
            raise DecodingError(part.error)
        if (made := part.result) is not None:
            tokens, stats = made.tokens, made.stats
            took = len(tokens), stats.seconds.decoding, stats.rounds
            yield part.number, Sample(tokens, *took, made.text, stats)


def measure(
    prompts: Sequence[Prompt],
    methods: Sequence[Method],
    encode: Callable[[str], Sequence[int]],
    *,
    repeats: int = 3,
    progress: Progress = lambda done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurements:
    """Run every method on every prompt, and return the samples. The first output of each method, or
    its first batch, does not count. Ctrl-C ends it early; the run that it interrupts does not
    count. Raises PromptError if no prompt can be used.

    Args:
        prompts: The prompts. Methods for complete files get their first turns.
        methods: The methods. The first one is plain decoding, which answers earlier turns.
        encode: Returns the token ids of a prompt, or raises PromptError.
        repeats: The number of samples of each case by each method.
        progress: Receives the number of completed outputs.
    """
    whole = methods[0].batch_size is not None
    cases = [
        Case(number, turn, prompt.category)
        for number, prompt in enumerate(prompts)
        for turn in range(1 if whole else len(prompt.turns))
    ]
    measured = Measurements(methods, cases, {method.name: {} for method in methods})
    answers: dict[tuple[int, int], str] = {}
    done = 0

    @functools.cache
    def ids(index: int) -> Sequence[int]:
        """Encode a turn, after the earlier turns and the answers of plain decoding."""
        case = cases[index]
        *earlier, last = prompts[case.prompt].turns[: case.turn + 1]
        talk = ((text, answers.get((case.prompt, turn), "")) for turn, text in enumerate(earlier))
        return encode("\n\n".join([*chain.from_iterable(talk), last]))

    def usable(index: int) -> bool:
        try:
            ids(index)
        except PromptError as problem:
            measured.skipped[index] = str(problem)
        return index not in measured.skipped

    def run(method: Method, indices: Sequence[int]) -> dict[int, Sample]:
        """Return the samples of some cases by their numbers."""
        nonlocal done
        samples: dict[int, Sample] = {}
        mx.reset_peak_memory()
        started = clock()
        for at, sample in method.run([ids(index) for index in indices]):
            samples[indices[at]] = sample
            done += 1
            report()
        seconds = clock() - started
        peak = max(mx.get_peak_memory(), measured.peak_memory.get(method.name, 0))
        measured.peak_memory[method.name] = peak
        if method.batch_size is None:
            return samples
        return {at: replace(one, seconds=seconds / len(samples)) for at, one in samples.items()}

    def report() -> None:
        left = len(cases) - len(measured.skipped)
        progress(done, warmed + repeats * len(methods) * left)

    first_turns = (index for index, case in enumerate(cases) if case.turn == 0)
    most = max(method.batch_size or 1 for method in methods)
    warm = list(islice(filter(usable, first_turns), most))
    warmed = sum(len(warm[: method.batch_size or 1]) for method in methods)
    try:
        report()
        for method in methods:
            run(method, warm[: method.batch_size or 1])
        every = range(len(cases))
        groups = [[*every]] if whole else [[index] for index in every]
        for repeat in range(repeats):
            for number, group in enumerate(groups):
                left = list(filter(usable, group))
                first = (number + repeat) % len(methods)
                for method in (*methods[first:], *methods[:first]) if left else ():
                    for index, sample in run(method, left).items():
                        measured.samples[method.name][index, repeat] = sample
                        if method is methods[0]:
                            answers.setdefault(
                                (cases[index].prompt, cases[index].turn), sample.text
                            )
    except KeyboardInterrupt:
        measured.interrupted = True
    if len(measured.skipped) == len(cases):
        raise PromptError(f"no prompt can be measured; the first: {measured.skipped[0]}")
    return measured
