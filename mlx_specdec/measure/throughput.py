"""Measures the throughput of complete files at several batch sizes, including the prefill."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from statistics import median

import mlx.core as mx

from ..core.options import Options
from ..engine.drafters import drafters
from ..engine.generate import stream_many
from ..engine.pair import Pair
from ..engine.request import encode, proposer_kind
from ..errors import DecodingError, PromptError
from ..text.prompts import Prompt
from ..types import Progress, ignore_progress
from .figures import Difference, fastest, figure, find_difference, same_text, tokens_per_round
from .methods import Length, Sample, keeps_text, room, turned

Prompts = Sequence[Sequence[int]]
Texts = Iterator[tuple[int, Sample]]
"""Yields the number and the sample of each prompt when it is complete. The seconds are 0."""


@dataclass(frozen=True)
class FileMethod:
    """One way to decode a file; see `Method`."""

    name: str
    family: str
    batch_size: int
    same_text: bool
    run: Callable[[Prompts], Texts]


@dataclass(frozen=True)
class FileFigures:
    """The figures of one method, which are medians of the repeats.

    Attributes:
        speed_up: The speedup over plain decoding with batch size 1.
        over_plain: The speedup over plain decoding with the same batch size.
        peak_memory_bytes: The peak memory, including the weights.
        compared: The number of outputs that should equal the outputs of plain decoding.
        differences: The outputs that do not.
    """

    name: str
    family: str
    batch_size: int
    tokens_per_second: float | None
    texts_per_second: float | None
    speed_up: float | None
    over_plain: float | None
    tokens_per_round: float | None
    peak_memory_bytes: int | None
    compared: int
    differences: tuple[Difference, ...]

    def cells(self) -> dict[str, str]:
        """Return the row of the table, by column."""
        memory = self.peak_memory_bytes
        return {
            "method": self.name,
            "tokens/s": figure(self.tokens_per_second, ".1f"),
            "texts/s": figure(self.texts_per_second, ".2f"),
            "speedup": figure(self.speed_up, ".2f"),
            "over plain": figure(self.over_plain, ".2f"),
            "acceptance length": figure(self.tokens_per_round, ".2f"),
            "peak memory": "" if memory is None else f"{memory / 1e6:.0f} MB",
            "same text": same_text(self.compared, self.differences),
        }


@dataclass(frozen=True)
class Throughput:
    """The figures of all methods. The first method is plain decoding with batch size 1."""

    methods: tuple[FileFigures, ...]
    texts: int
    repeats: int
    skipped: Mapping[int, str]
    interrupted: bool

    @property
    def verdict(self) -> str:
        """A sentence on the fastest method, or "" if only plain decoding ran."""
        best = fastest(self.methods)
        if best is None or len(self.methods) < 2:
            return ""
        text = f"{best.name} is fastest: {best.speed_up:.2f} times plain decoding of one text at a "
        text += "time"
        speculative = [m for m in self.methods if m.tokens_per_round and m.over_plain]
        if speculative:
            gains = ", ".join(f"{m.over_plain:.2f} with {m.batch_size}" for m in speculative)
            text += f"; speculation over plain decoding by batch size: {gains}"
        return text + "."


@dataclass(frozen=True)
class FileRun:
    """One run over a file: the samples by the number of their prompt, and the seconds."""

    samples: Mapping[int, Sample]
    seconds: float
    peak_memory_bytes: int

    @property
    def tokens_per_second(self) -> float:
        """The throughput of generated tokens, including EOS tokens."""
        return sum(sample.counted for sample in self.samples.values()) / self.seconds


Runs = list[FileRun]
"""The runs of one method. The last one is missing after an interrupt."""


def file_methods(
    pair: Pair, options: Options, proposer: str | None, length: Length, sizes: Sequence[int]
) -> tuple[list[FileMethod], list[str]]:
    """Return plain and speculative decoding at all batch sizes, and plain decoding at batch size 1.

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
        methods.append(FileMethod("plain", "plain", size, True, _runner(pair, plain, size)))
        if size in sizes:
            run = _runner(pair, drafting, size)
            methods.append(FileMethod(name, kind, size, keeps_text(drafting), run))
        if size > 1:
            streams = (stream_many(pair, [], how, batch_size=size) for how in (plain, drafting))
            reasons += [stream.why_not for stream in streams if stream.why_not is not None]
    return methods, [f"texts were made in turns: {why}" for why in dict.fromkeys(reasons)]


def _runner(pair: Pair, options: Options, size: int) -> Callable[[Prompts], Texts]:
    def run(prompts: Prompts) -> Texts:
        for part in stream_many(pair, prompts, options, batch_size=size):
            if part.error is not None:
                raise DecodingError(part.error)
            if (made := part.result) is not None:
                tokens, stats = made.tokens, made.stats
                yield part.number, Sample(tokens, len(tokens), 0.0, stats.rounds, stats=stats)

    return run


def encoded(
    pair: Pair, prompts: Sequence[Prompt], options: Options
) -> tuple[dict[int, list[int]], dict[int, str]]:
    """Return the token ids of the first turns, and why prompts are skipped, by prompt number.
    Raises PromptError if all prompts are skipped."""
    taken: dict[int, list[int]] = {}
    skipped: dict[int, str] = {}
    for number, prompt in enumerate(prompts):
        try:
            ids = encode(pair, prompt.turns[0], options)
            room(pair, options, ids)
        except PromptError as problem:
            skipped[number] = str(problem)
        else:
            taken[number] = ids
    if not taken:
        raise PromptError(f"no prompt can be measured; the first: {skipped[0]}")
    return taken, skipped


def measure_files(
    prompts: Mapping[int, Sequence[int]],
    methods: Sequence[FileMethod],
    *,
    skipped: Mapping[int, str],
    repeats: int = 3,
    progress: Progress = ignore_progress,
    clock: Callable[[], float] = time.perf_counter,
) -> Throughput | None:
    """Measure all methods and return their figures, or None if plain decoding has none. The first
    batch of each method does not count. Ctrl-C ends it early; the run that it interrupts does not
    count.

    Args:
        prompts, skipped: Token ids, or why the prompt is skipped, by its number in the file.
        methods: The methods. The first one is plain decoding with batch size 1.
        repeats: The number of runs of each method.
        progress: Receives the number of completed outputs.
    """
    ids, runs = list(prompts.values()), [Runs() for _ in methods]
    warm = [ids[: method.batch_size] for method in methods]
    total = sum(map(len, warm)) + repeats * len(methods) * len(prompts)
    counter = count(1)

    def run(method: FileMethod, prompts: Prompts) -> FileRun:
        samples: dict[int, Sample] = {}
        mx.reset_peak_memory()
        started = clock()
        for number, sample in method.run(prompts):
            samples[number] = sample
            progress(next(counter), total)
        seconds = clock() - started
        return FileRun(samples, seconds, mx.get_peak_memory())

    progress(0, total)
    both = list(zip(methods, runs, strict=True))
    interrupted = True
    with suppress(KeyboardInterrupt):
        for method, few in zip(methods, warm, strict=True):
            run(method, few)
        for repeat in range(repeats):
            for method, done in turned(both, repeat):
                done.append(run(method, ids))
        interrupted = False
    if not runs[0]:
        return None
    plain = {method.batch_size: done for method, done in both if method.family == "plain"}
    figures = (
        _figures(method, done, runs[0], plain[method.batch_size], prompts) for method, done in both
    )
    return Throughput(tuple(figures), len(prompts), len(runs[0]), skipped, interrupted)


def _figures(
    method: FileMethod,
    runs: Runs,
    first: Runs,
    plain: Runs,
    prompts: Mapping[int, Sequence[int]],
) -> FileFigures:
    compared = [run.samples for run in runs] if method.same_text else []
    peaks = [run.peak_memory_bytes for run in runs]
    differences = []
    for samples in compared:
        for at, number in enumerate(prompts):
            expected, tokens = first[0].samples[at].tokens, samples[at].tokens
            if expected != tokens:
                differences.append(find_difference(number, 0, expected, tokens))
    return FileFigures(
        name=f"{method.name}, batch {method.batch_size}",
        family=method.family,
        batch_size=method.batch_size,
        tokens_per_second=_median([run.tokens_per_second for run in runs]),
        texts_per_second=_median([len(run.samples) / run.seconds for run in runs]),
        speed_up=_ratio(runs, first),
        over_plain=_ratio(runs, plain) if runs is not plain else None,
        tokens_per_round=tokens_per_round(s for run in runs for s in run.samples.values()),
        peak_memory_bytes=max(peaks, default=None),
        compared=sum(map(len, compared)),
        differences=tuple(differences),
    )


def _ratio(runs: Runs, base: Runs) -> float | None:
    """Return the median of the ratios of the repeats, in which drifts of the machine cancel."""
    pairs = zip(runs, base, strict=False)
    return _median([run.tokens_per_second / plain.tokens_per_second for run, plain in pairs])


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
