"""The prompts of a benchmark that names none, and the description of its settings."""

import platform
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .. import system
from ..checkpoints.stored_models import ROOT
from ..core.options import Options
from ..engine.pair import Pair
from ..errors import OptionError
from ..version import __version__

CPU_NAMES = Path("/proc/cpuinfo")
CPU_NAME_OF_MAC = ("sysctl", "-n", "machdep.cpu.brand_string")
SAMPLES = {"t5-enfr": "translation.jsonl", "py-llama": "python.jsonl"}
"""Files of sample prompts, by the name of a shipped target's directory."""


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
        for line in CPU_NAMES.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    with suppress(OSError, subprocess.SubprocessError):
        sysctl = subprocess.run(CPU_NAME_OF_MAC, capture_output=True, text=True, check=True)
        return sysctl.stdout.strip()
    return platform.processor() or platform.machine()
