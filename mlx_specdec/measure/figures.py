"""Runs a benchmark and reports on it: the figures of its methods, its setting, and a plot."""

import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import groupby, zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any

from .. import system
from ..checkpoints.stored_models import ROOT
from ..core.options import Options
from ..core.statistics import ratio
from ..engine.pair import Pair
from ..engine.prompt_cache import common
from ..errors import OptionError, OutputError
from ..text.prompts import Prompt
from ..version import __version__
from .methods import (
    Key,
    Length,
    Measurements,
    Method,
    Sample,
    encoded,
    file_methods,
    measure,
    own_methods,
)

OF_FILES = ("texts/s", "over plain", "peak memory")
"""Columns of methods for complete files."""
OF_PROMPTS = ("spread", "acceptance rate")
"""Columns of methods for single prompts."""
DISPENSABLE = dict.fromkeys(
    ("texts/s", "acceptance length", "spread", "acceptance rate", "peak memory", "same text"), ""
)
"""Columns that are left out on a narrow terminal, in this order."""

ROUNDING = (
    "In half precision a GPU sums one row and several rows in different orders, so outputs can "
    "part where two tokens tie: that is no error, and --exact prevents it (docs/platforms.md)."
)
SAMPLES = {"t5-enfr": "translation.jsonl", "py-llama": "python.jsonl"}
"""Files of sample prompts, by the name of a shipped target's directory."""


def figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


@dataclass(frozen=True)
class Difference:
    """An output that should equal the output of plain decoding, but does not. `position` is the
    first token that differs."""

    prompt: int
    turn: int
    position: int


@dataclass(frozen=True)
class Figures:
    """The figures of one method.

    Attributes:
        batch_size: The batch size of a method for complete files, and otherwise None.
        texts: The number of sequences.
        speed_up: The ratio of tokens per second to plain decoding, with median times of the
            repeats. Files are decoded plainly with batch size 1.
        over_plain: The speedup of a file over plain decoding with the same batch size.
        spread: The smallest and the largest speedup of a repeat.
        by_category: The speedups for the prompts of each category.
        acceptance: Entry i - 1 is the share of rounds that accepted the first i draft tokens.
        peak_memory_bytes: The peak memory, including the weights.
        compared: The number of outputs that should equal the outputs of plain decoding.
        differences: The outputs that do not.
    """

    name: str
    family: str
    num_draft: Length
    batch_size: int | None
    texts: int
    tokens_per_second: float | None
    texts_per_second: float | None
    speed_up: float | None
    over_plain: float | None
    spread: tuple[float, float] | None
    by_category: Mapping[str, float]
    tokens_per_round: float | None
    acceptance_rate: float | None
    acceptance: tuple[float, ...]
    peak_memory_bytes: int | None
    compared: int
    differences: tuple[Difference, ...]

    def cells(self) -> dict[str, str]:
        """Return the row of the table, by column."""
        base = self.family == "plain" and self.batch_size is None
        spread = "" if base or self.spread is None else "{:.2f} to {:.2f}".format(*self.spread)
        memory = self.peak_memory_bytes
        same = f"{self.compared - len(self.differences)} of {self.compared}"
        columns = {
            "method": self.name,
            "tokens/s": figure(self.tokens_per_second, ".1f"),
            "texts/s": figure(self.texts_per_second, ".2f"),
            "speedup": "1" if base else figure(self.speed_up, ".2f"),
            "over plain": figure(self.over_plain, ".2f"),
            "spread": spread,
            "acceptance length": figure(self.tokens_per_round, ".2f"),
            "acceptance rate": figure(self.acceptance_rate, ".0%"),
            "peak memory": "" if memory is None else f"{memory / 1e6:.0f} MB",
            "same text": "" if base else same if self.compared else "not promised",
        }
        left_out = OF_FILES if self.batch_size is None else OF_PROMPTS
        return {name: text for name, text in columns.items() if name not in left_out}


@dataclass(frozen=True)
class Analysis:
    """The figures of all methods.

    Attributes:
        repeats: The number of times that sequences were generated at most.
        skipped: Number of a case -> the reason why it was skipped.
    """

    methods: tuple[Figures, ...]
    texts: int
    repeats: int
    skipped: Mapping[int, str]
    interrupted: bool

    @property
    def caption(self) -> str:
        """A line on the number of sequences."""
        text = f"{self.texts} texts, each up to {self.repeats} times, methods in turns"
        text += f"; {len(self.skipped)} skipped" if self.skipped else ""
        return text + ("; interrupted" if self.interrupted else "")

    def different(self, *, exact: bool) -> list[str]:
        """Return lines on outputs that should equal the output of plain decoding, but do not.
        exact: Whether `Options.exact` was set."""
        lines = [
            f"{one.name}: {len(one.differences)} of {one.compared} texts are not plain decoding's "
            "own"
            for one in self.methods
            if one.differences
        ]
        return [*lines, ROUNDING] if lines and not exact else lines

    @property
    def verdict(self) -> str:
        """A sentence on the fastest method, or "" if only plain decoding ran."""
        plain, *others = self.methods
        best = fastest(others if plain.batch_size is None else self.methods)
        if best is None or not others:
            return ""
        gain = best.speed_up or 0.0
        if plain.batch_size is not None:
            text = f"{best.name} is fastest: {gain:.2f} times plain decoding of one text at a time"
            gains = [one for one in others if one.tokens_per_round and one.over_plain]
            shown = ", ".join(f"{one.over_plain:.2f} with {one.batch_size}" for one in gains)
            more = f"; speculation over plain decoding by batch size: {shown}" if shown else ""
            return f"{text}{more}."
        if gain <= 1:
            return (
                f"Nothing is faster than plain decoding; {best.name} comes closest with {gain:.2f} "
                "of its speed."
            )
        auto = fastest(method for method in self.methods if method.num_draft == "auto")
        text = f"{best.name} is fastest: {gain:.2f} times plain decoding"
        if auto is not None and auto is not best:
            text += f"; {auto.name} reaches {(auto.speed_up or 0.0) / gain:.2f} of it"
        return text + "."


def fastest(methods: Iterable[Figures]) -> Figures | None:
    """Return the method with the highest speedup, if any has one."""
    known = (method for method in methods if method.speed_up)
    return max(known, key=lambda method: method.speed_up or 0.0, default=None)


def benchmark(
    pairs: Sequence[Pair],
    options: Options,
    prompts: Sequence[Prompt],
    proposers: Sequence[str],
    lengths: Sequence[Length],
    sizes: Sequence[int] = (),
    **measuring: Any,
) -> tuple[Analysis | None, list[str]]:
    """Measure pairs, and return the figures, or None if an interrupt came before there were any.
    Also return notes on models that cannot decode several sequences at once.

    Args:
        pairs: One target with each of the drafts to compare.
        proposers, lengths: See `own_methods`.
        sizes: The batch sizes to measure complete files at, with one pair, one length and at most
            one proposer. If there are none, prompts are decoded one by one.
        measuring: Further arguments of `measure`.
    """
    notes: list[str] = []
    if sizes:
        proposer = next(iter(proposers), None)
        methods, notes = file_methods(pairs[0], options, proposer, lengths[0], sizes)
    else:
        methods = own_methods(pairs, options, proposers, lengths)
    encode = partial(encoded, pairs[0], options)
    return analyse(measure(prompts, methods, encode, **measuring)), notes


def analyse(measured: Measurements) -> Analysis | None:
    """Return all figures, or None if plain decoding has no sample."""
    if tokens_per_second(measured.plain) is None:
        return None
    return Analysis(
        methods=tuple(figures_of(measured, method) for method in measured.methods),
        texts=len({case for case, _ in measured.plain}),
        repeats=1 + max(repeat for _, repeat in measured.plain),
        skipped=measured.skipped,
        interrupted=measured.interrupted,
    )


def figures_of(measured: Measurements, method: Method) -> Figures:
    """Return the figures of a method."""
    samples = measured.samples[method.name]
    made = samples.values()
    stats = [sample.stats for sample in made if sample.stats is not None]
    drafted = zip_longest(*(one.drafted_by_position for one in stats), fillvalue=0)
    accepted = zip_longest(*(one.accepted_by_position for one in stats), fillvalue=0)
    by_position = zip(map(sum, accepted), map(sum, drafted), strict=True)
    cases = {key: measured.cases[key[0]] for key in samples}
    differences = [
        Difference(cases[key].prompt, cases[key].turn, common(plain.tokens, sample.tokens))
        for key, sample in sorted(samples.items())
        if method.same_text
        and (plain := measured.plain.get(key)) is not None
        and plain.tokens != sample.tokens
    ]
    groups: dict[object, dict[Key, Sample]] = {}
    for key, sample in samples.items():
        for group in (cases[key].category, key[1]):
            groups.setdefault(group, {})[key] = sample
    gains = {group: _speed_up(measured.plain, chosen) for group, chosen in groups.items()}
    spread = [gain for group, gain in gains.items() if isinstance(group, int) and gain]
    texts, size = {case for case, _ in samples}, method.batch_size
    # Among methods for files, plain decoding precedes others with the same batch size.
    base = next((one for one in measured.methods if one.batch_size == size), method)
    same_size = measured.samples[base.name]
    return Figures(
        name=method.name,
        family=method.family,
        num_draft=method.num_draft,
        batch_size=size,
        texts=len(texts),
        tokens_per_second=tokens_per_second(samples),
        texts_per_second=ratio(len(texts), seconds(samples)),
        speed_up=_speed_up(measured.plain, samples),
        over_plain=None if base is method else _speed_up(same_size, samples),
        spread=(min(spread), max(spread)) if spread else None,
        by_category={name: gain for name, gain in gains.items() if isinstance(name, str) and gain},
        tokens_per_round=ratio(
            sum(sample.counted for sample in made if sample.rounds),
            sum(sample.rounds or 0 for sample in made),
        ),
        acceptance_rate=ratio(sum(s.accepted for s in stats), sum(s.drafted for s in stats)),
        acceptance=tuple(part / count for part, count in by_position if count),
        peak_memory_bytes=measured.peak_memory.get(method.name),
        compared=len(samples) if method.same_text else 0,
        differences=tuple(differences),
    )


def _speed_up(plain: Mapping[Key, Sample], samples: Mapping[Key, Sample]) -> float | None:
    """Return the ratio of the tokens per second of the sequences that both have."""
    both = plain.keys() & samples.keys()
    speeds = [tokens_per_second({key: made[key] for key in both}) for made in (samples, plain)]
    return speeds[0] / speeds[1] if speeds[0] and speeds[1] else None


def seconds(samples: Mapping[Key, Sample]) -> float:
    """Return the seconds of all sequences together, the median of the repeats for each."""
    by_case = groupby(sorted(samples), key=itemgetter(0))
    return sum(median(samples[key].seconds for key in keys) for _, keys in by_case)


def tokens_per_second(samples: Mapping[Key, Sample]) -> float | None:
    """Return the tokens per second of all sequences, with the median time of the repeats."""
    first = {key[0]: samples[key] for key in sorted(samples, reverse=True)}
    return ratio(sum(sample.counted for sample in first.values()), seconds(samples))


def setting(
    pairs: Sequence[Pair], options: Options, prompts: Path, notes: Sequence[str] = ()
) -> dict[str, Any]:
    """Describe a benchmark that runs now on this machine. All pairs have one target. notes:
    Sentences on models that cannot decode several sequences at once."""
    versions = {"mlx-specdec": __version__}
    for name in ("mlx", "mlx-lm", "transformers", "torch"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "model": pairs[0].name,
        "draft_model": ", ".join(pair.draft_name for pair in pairs if pair.draft_name) or None,
        "dtype": pairs[0].dtype,
        "prompts": prompts.name,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "rule": options.rule_name,
        "lossy": options.lossy,
        "seed": options.seed,
        "device": system.device_name(),
        "machine": processor(),
        "system": f"{platform.system()} {platform.release()}",
        "blas": system.blas_name(),
        "python": platform.python_version(),
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "notes": [*notes],
    }


def sample(model: str) -> Path:
    """Return the prompt file of a shipped target. Raises OptionError for any other target."""
    name = SAMPLES.get(Path(model).name.removesuffix("-medusa"))
    if name is None or not (ROOT / "prompts" / name).is_file():
        raise OptionError("no prompts: name a file with one prompt a line")
    return ROOT / "prompts" / name


def title(setting: Mapping[str, Any]) -> str:
    """Return a benchmark's models, number format, temperature and device in one line."""
    models = " with ".join(filter(None, (setting["model"], setting["draft_model"])))
    form = "{}, {dtype}, temperature {temperature:g}; {device}, BLAS {blas}"
    return form.format(models, **setting)


def processor() -> str:
    """Return the processor's name, or the architecture if the system does not name it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with suppress(OSError, subprocess.SubprocessError):
        words = ("sysctl", "-n", "machdep.cpu.brand_string")
        sysctl = subprocess.run(words, capture_output=True, text=True, check=True)
        return sysctl.stdout.strip()
    return platform.processor() or platform.machine()


def check_plot(file: Path) -> None:
    """Raise OptionError if a plot cannot be drawn into this file."""
    if file.suffix not in (".png", ".svg"):
        raise OptionError(f"--plot must name a file that ends with .png or .svg, not {file.name}")
    if not file.absolute().parent.is_dir():
        raise OptionError(f"--plot: there is no directory {file.parent}")
    if find_spec("matplotlib") is None:
        needed = system.install("plot")
        raise OptionError(f"--plot needs matplotlib, the extra mlx-specdec[plot]: {needed}")


def draw_plot(methods: Sequence[Figures], title: str, file: Path) -> None:
    """Write the plot. Bars span the repeats. Raises OutputError if the file cannot be written."""
    from matplotlib.figure import Figure as Picture

    picture = Picture(figsize=(7, 4.5), layout="constrained")
    axes = picture.subplots()
    axes.axhline(1.0, color="gray", linewidth=1)
    for family in dict.fromkeys(method.family for method in methods[1:]):
        points = [
            (int(one.num_draft), one.speed_up, one.spread)
            for one in methods
            if one.family == family and one.num_draft != "auto" and one.speed_up and one.spread
        ]
        if not points:
            continue
        lengths, speeds, spreads = zip(*sorted(points), strict=True)
        below = [max(0.0, speed - low) for speed, (low, _) in zip(speeds, spreads, strict=True)]
        above = [max(0.0, high - speed) for speed, (_, high) in zip(speeds, spreads, strict=True)]
        axes.errorbar(lengths, speeds, (below, above), marker="o", capsize=3, label=family)
    for one in methods:
        if one.num_draft == "auto" and one.speed_up:
            axes.axhline(one.speed_up, linestyle="--", linewidth=1, label=one.name, color="C7")
    axes.set(title=title, xlabel="draft length", ylabel="speed relative to plain decoding")
    axes.set_ylim(bottom=0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    try:
        with system.replacing(file, make_parents=False) as stream:
            picture.savefig(stream, format=file.suffix[1:])
    except OSError as problem:
        raise OutputError(f"cannot write the plot to {file}: {problem.strerror}") from None
