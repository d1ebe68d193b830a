"""Describes the settings of a benchmark."""

import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .. import system
from ..core.options import Options
from ..engine.pair import Pair
from ..version import __version__

CPU_NAMES = Path("/proc/cpuinfo")
CPU_NAME_OF_MAC = ("sysctl", "-n", "machdep.cpu.brand_string")


@dataclass(frozen=True)
class Setting:
    """The settings of a benchmark. `draft_model` lists names with commas, and `notes` has sentences
    on models that cannot decode several sequences at once."""

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


def setting(
    pairs: Sequence[Pair], options: Options, prompts: Path, notes: Sequence[str] = ()
) -> Setting:
    """Describe a benchmark that runs now on this machine. All pairs have one target."""
    versions = {"mlx-specdec": __version__}
    for name in ("mlx", "mlx-lm", "transformers", "torch"):
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return Setting(
        model=pairs[0].name,
        draft_model=", ".join(pair.draft_name for pair in pairs if pair.draft_name) or None,
        dtype=pairs[0].dtype,
        prompts=prompts.name,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        rule=options.rule_name,
        lossy=options.lossy,
        seed=options.seed,
        device=system.device_name(),
        machine=processor(),
        system=f"{platform.system()} {platform.release()}",
        blas=system.blas_name(),
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        notes=tuple(notes),
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
