"""What figures were taken on and with: machine, versions, models, settings."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import __version__
from .. import process as blas
from ..engine.drafters import device_name
from ..engine.pair import Pair
from ..options import Options

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
