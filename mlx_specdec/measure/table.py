"""Formats a benchmark as text: the setting, a table of the methods, and a sentence."""

import platform
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import process
from ..engine.pair import Pair
from ..options import Options
from ..version import __version__
from .analysis import Analysis, ClusterFigures, Figures, fastest, overall
from .throughput import FileFigures, Throughput

CPU_NAMES = Path("/proc/cpuinfo")
CPU_NAME_OF_MAC = ("sysctl", "-n", "machdep.cpu.brand_string")
CLUSTER_COLUMNS = ("method", "speedup", "on one machine", "gains more above")


@dataclass(frozen=True)
class Setting:
    """The settings of a benchmark. `draft_model` lists names with commas, and `notes` has sentences
    on other programs."""

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
    """Describe a benchmark that runs now on this machine. All pairs have one target."""
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
        device=process.device_name(),
        machine=processor(),
        system=f"{platform.system()} {platform.release()}",
        blas=process.name(),
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=tuple(notes),
        simulated_acceptance=options.simulated_acceptance,
    )


def processor() -> str:
    """Return the processor's name, or the architecture if the system does not name it."""
    with suppress(OSError):
        for line in CPU_NAMES.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with suppress(OSError, subprocess.SubprocessError):
        sysctl = subprocess.run(CPU_NAME_OF_MAC, capture_output=True, text=True, check=True)
        return sysctl.stdout.strip()
    return platform.processor() or platform.machine()


Measured = Analysis | Throughput


@dataclass(frozen=True)
class Table:
    """A table with a row for every method. `best` is the index of the fastest method's row."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: int | None = None


def table(analysis: Measured) -> Table:
    """Return the table of all figures. A cell without a figure is empty."""
    best: Figures | FileFigures | None
    if isinstance(analysis, Throughput):
        best, rows = most(analysis.methods), [_file_cells(method) for method in analysis.methods]
    else:
        best, rows = fastest(analysis.methods), [_cells(method) for method in analysis.methods]
    place = next((at for at, method in enumerate(analysis.methods) if method is best), None)
    return Table(tuple(rows[0]), tuple(tuple(row.values()) for row in rows), place)


def _cells(method: Figures) -> dict[str, str]:
    is_plain = method.family == "plain"
    ratio = None if is_plain else method.speed_up
    speed = "1" if is_plain else ""
    return {
        "method": method.name,
        "tokens/s": _number(method.tokens_per_second, ".1f"),
        "speedup": f"{ratio.overall.value:.2f}" if ratio else speed,
        "95 % interval": ratio.overall.interval if ratio else "",
        "median sequence": f"{ratio.per_text.value:.2f}" if ratio else "",
        "predicted": _number(method.predicted, ".2f"),
        "acceptance length": _number(method.tokens_per_round, ".2f"),
        "acceptance rate": _number(method.acceptance_rate, ".0%"),
        "same text": "" if is_plain else _same_text(method),
    }


def _file_cells(method: FileFigures) -> dict[str, str]:
    memory = method.peak_memory_bytes
    return {
        "method": method.name,
        "tokens/s": _number(method.tokens_per_second, ".1f"),
        "texts/s": _number(method.texts_per_second, ".2f"),
        "speedup": _number(method.speed_up, ".2f"),
        "over plain": _number(method.over_plain, ".2f"),
        "acceptance length": _number(method.tokens_per_round, ".2f"),
        "peak memory": "" if memory is None else f"{memory / 1e6:.0f} MB",
        "same text": _same_text(method),
    }


def _same_text(method: Figures | FileFigures) -> str:
    same = method.compared - len(method.differences)
    return f"{same} of {method.compared}" if method.compared else "not promised"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def cluster_table(cluster: ClusterFigures) -> Table:
    """Return the speedups of each method on the cluster and on one machine."""
    rows = []
    for gain in cluster.gains:
        even = "never" if gain.break_even_us is None else f"{gain.break_even_us:.0f} us"
        rows.append((gain.name, f"{gain.speed_up:.2f}", f"{gain.alone:.2f}", even))
    return Table(CLUSTER_COLUMNS, tuple(rows))


def cluster_text(cluster: ClusterFigures, plain_step: float) -> str:
    """Return sentences on the time of the network. `plain_step` is in seconds."""
    times = ", ".join(
        f"{us:.0f} us over {tokens} token{'' if tokens == 1 else 's'}"
        for tokens, us in cluster.exchange_us.items()
    )
    text = (
        f"{cluster.machines} machines ({cluster.mode}): in a pass, an all_sum takes "
        f"{times}; {cluster.exchanges} exchanges take "
        f"{cluster.network_ms:.2f} of the {1000 * plain_step:.2f} ms of a plain step"
    )
    if not cluster.gains:
        return f"{text}. Nothing can be said of one machine."
    return f"{text}. What one machine would gain is computed from these times."


def most(methods: Iterable[FileFigures]) -> FileFigures:
    """Return the method with the highest throughput."""
    return max(methods, key=lambda method: method.speed_up or 0.0)


def as_dict(analysis: Measured, setting: Setting) -> dict[str, Any]:
    """Return the payload of --json."""
    return {"setting": asdict(setting), **asdict(analysis)}


def verdict(analysis: Measured) -> str:
    """Return a sentence on the fastest method, or "" if only plain decoding ran."""
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
    auto = fastest(method for method in analysis.methods if method.num_draft == "auto")
    text = f"{best.name} is fastest: {overall(best):.2f} times plain decoding"
    if auto is not None and auto is not best:
        text += f"; {auto.name} reaches {overall(auto) / overall(best):.2f} of it"
    return text + "."


def _file_verdict(methods: Sequence[FileFigures]) -> str:
    best = most(methods)
    if best.speed_up is None or len(methods) < 2:
        return ""
    text = f"{best.name} is fastest: {best.speed_up:.2f} times plain decoding of one text at a time"
    speculative = [method for method in methods if method.tokens_per_round and method.over_plain]
    if speculative:
        gains = ", ".join(
            f"{method.over_plain:.2f} with {method.batch_size}" for method in speculative
        )
        text += f"; speculation over plain decoding by batch size: {gains}"
    return text + "."
