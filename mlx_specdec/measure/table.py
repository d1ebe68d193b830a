"""What figures were taken on and with: machine, versions, models, settings."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import __version__
from .. import process as blas
from ..engine.drafters import device_name
from ..engine.pair import Pair
from ..options import Options
from .analysis import Analysis, ClusterFigures, Figures, fastest, overall
from .throughput import FileFigures, Throughput

CPU_NAMES = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Setting:
    """Everything that a figure depends on, apart from the prompts themselves.

    versions: of the packages that take part, where they are installed. draft_model: several are
    separated by commas. notes: sentences on the other programs that were measured, or were not.
    simulated_acceptance: where drafted tokens were kept with this probability, and what was made is
    no text.
    """

    model: str
    draft_model: str | None
    dtype: str
    prompts: str
    max_tokens: int
    temperature: float
    rule: str
    lossy: bool
    seed: int
    device: str
    machine: str
    system: str
    blas: str
    python: str
    versions: dict[str, str]
    date: str
    notes: tuple[str, ...] = ()
    simulated_acceptance: float | None = None


def setting(
    pairs: Sequence[Pair], options: Options, prompts: Path, notes: Sequence[str] = ()
) -> Setting:
    """This machine, now. pairs: one target, with each of its drafts."""
    drafts = [pair.draft_name for pair in pairs if pair.draft_name is not None]
    versions = {"mlx-specdec": __version__}
    for name in ("mlx", "mlx-lm", "transformers", "torch"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Setting(
        model=pairs[0].name,
        draft_model=", ".join(drafts) or None,
        dtype=pairs[0].dtype,
        prompts=prompts.name,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rule=options.rule_name,
        lossy=options.lossy,
        seed=options.seed,
        device=device_name(),
        machine=processor(CPU_NAMES),
        system=f"{platform.system()} {platform.release()}",
        blas=blas.name(),
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=tuple(notes),
        simulated_acceptance=options.simulated_acceptance,
    )


def processor(cpu_names: Path) -> str:
    """The processor's name as its maker wrote it, or the architecture where nothing tells."""
    try:
        lines = cpu_names.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


COLUMNS = (
    "method",
    "tokens/s",
    "speedup",
    "95 % interval",
    "median sequence",
    "predicted",
    "acceptance length",
    "acceptance rate",
    "same text",
)


FILE_COLUMNS = (
    "method",
    "tokens/s",
    "texts/s",
    "speedup",
    "over plain",
    "acceptance length",
    "peak memory",
    "same text",
)
CLUSTER_COLUMNS = ("method", "speedup", "on one machine", "gains more above")
Measured = Analysis | Throughput


@dataclass(frozen=True)
class Table:
    """A row of cells for every method. best: the row of the fastest one, if any is."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None


def table(analysis: Measured) -> Table:
    """All figures in words."""
    if isinstance(analysis, Throughput):
        rows = tuple(map(_file_cells, analysis.methods))
        return Table(FILE_COLUMNS, rows, analysis.methods.index(most(analysis.methods)))
    best = fastest(analysis.methods)
    place = next((at for at, one in enumerate(analysis.methods) if one is best), None)
    return Table(COLUMNS, tuple(map(cells, analysis.methods)), place)


def cluster_table(cluster: ClusterFigures) -> Table:
    """What speculation gains there and on one machine, and from which exchange on it is more."""
    rows = [
        (
            one.name,
            f"{one.speed_up:.2f}",
            f"{one.alone:.2f}",
            "never" if one.break_even_us is None else f"{one.break_even_us:.0f} us",
        )
        for one in cluster.gains
    ]
    return Table(CLUSTER_COLUMNS, tuple(rows), None)


def cluster_text(cluster: ClusterFigures, plain_step: float) -> str:
    """What the network takes. plain_step: seconds."""
    alone, *others = (
        f"{us:.0f} us over {tokens} token{'' if tokens == 1 else 's'}"
        for tokens, us in cluster.exchange_us.items()
    )
    text = (
        f"{cluster.machines} machines ({cluster.mode}): in a pass, an all_sum takes "
        f"{', '.join([alone, *others])}; {cluster.exchanges} exchanges take "
        f"{cluster.network_ms:.2f} of the {1000 * plain_step:.2f} ms of a plain step"
    )
    if not cluster.gains:
        return f"{text}. Nothing can be said of one machine."
    return f"{text}. What one machine would gain is computed from these times."


def most(methods: Iterable[FileFigures]) -> FileFigures:
    """The one with the highest throughput."""
    return max(methods, key=lambda one: one.speed_up or 0.0)


def as_dict(analysis: Measured, setting: Setting) -> dict[str, Any]:
    """All figures and what they were taken with, as plain dictionaries and lists, for JSON."""
    return {"setting": asdict(setting), **asdict(analysis)}


def verdict(analysis: Measured) -> str:
    """What a reader wants to know first, in a sentence; empty where nothing but plain decoding ran.

    The length that was chosen while decoding is held against the best.
    """
    if isinstance(analysis, Throughput):
        return _file_verdict(analysis.methods)
    best = fastest(analysis.methods[1:])
    if best is None:
        return ""
    if overall(best) <= 1:
        return (
            f"Nothing is faster than plain decoding; {best.name} comes closest with "
            f"{overall(best):.2f} of its speed."
        )
    auto = fastest(one for one in analysis.methods if one.num_draft == "auto")
    text = f"{best.name} is fastest: {overall(best):.2f} times plain decoding"
    if auto is not None and auto is not best:
        text += f"; {auto.name} reaches {overall(auto) / overall(best):.2f} of it"
    return text + "."


def _file_verdict(methods: Sequence[FileFigures]) -> str:
    best = most(methods)
    if best.speed_up is None or len(methods) < 2:
        return ""
    text = f"{best.name} is fastest: {best.speed_up:.2f} times plain decoding of one text at a time"
    own = [one for one in methods if one.tokens_per_round and one.over_plain]
    if own:
        gains = ", ".join(f"{one.over_plain:.2f} with {one.batch_size}" for one in own)
        text += f"; speculation over plain decoding by batch size: {gains}"
    return text + "."


def cells(one: Figures) -> tuple[str, ...]:
    """A method's figures, one for each of COLUMNS; empty where there is none."""
    is_plain = one.family == "plain"
    same = "" if is_plain else _same_text(one)
    speedup, interval, per_text = ("1", "", "") if is_plain else ("", "", "")
    if one.speed_up is not None and not is_plain:
        ratio = one.speed_up.overall
        speedup, interval = f"{ratio.value:.2f}", ratio.interval
        per_text = f"{one.speed_up.per_text.value:.2f}"
    return (
        one.name,
        _number(one.tokens_per_second, ".1f"),
        speedup,
        interval,
        per_text,
        _number(one.predicted, ".2f"),
        _number(one.tokens_per_round, ".2f"),
        _number(one.acceptance_rate, ".0%"),
        same,
    )


def _file_cells(one: FileFigures) -> tuple[str, ...]:
    """One for each of FILE_COLUMNS."""
    memory = one.peak_memory_bytes
    return (
        one.name,
        _number(one.tokens_per_second, ".1f"),
        _number(one.texts_per_second, ".2f"),
        _number(one.speed_up, ".2f"),
        _number(one.over_plain, ".2f"),
        _number(one.tokens_per_round, ".2f"),
        "" if memory is None else f"{memory / 1e6:.0f} MB",
        _same_text(one),
    )


def _same_text(one: Figures | FileFigures) -> str:
    same = one.compared - len(one.differences)
    return f"{same} of {one.compared}" if one.compared else "not promised"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
