"""Describes the settings of a benchmark, and writes it as JSON or as one HTML file, which needs no
network. The markup is in report.html, a template of jinja2 that escapes every text."""

import json
import platform
import subprocess
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

from .. import process
from ..engine.pair import Pair
from ..errors import OutputError
from ..options import Options
from ..version import __version__
from .analysis import Analysis
from .presentation import Presentation
from .throughput import Throughput

CPU_NAMES = Path("/proc/cpuinfo")
CPU_NAME_OF_MAC = ("sysctl", "-n", "machdep.cpu.brand_string")
MOST_DIFFERENCES = 20
Measured = Analysis | Throughput


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
        device=process.device_name(),
        machine=processor(),
        system=f"{platform.system()} {platform.release()}",
        blas=process.name(),
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


def as_dict(analysis: Measured, setting: Setting) -> dict[str, Any]:
    """Return the payload of --json."""
    return {"setting": asdict(setting), **asdict(analysis)}


def write_report(analysis: Measured, setting: Setting, file: Path) -> None:
    """Write the page. Raises OutputError if the file cannot be written."""
    try:
        with process.replacing(file, make_parents=False) as stream:
            stream.write(page(analysis, setting).encode())
    except OSError as problem:
        raise OutputError(f"cannot write the report to {file}: {problem.strerror}") from None


def page(analysis: Measured, setting: Setting) -> str:
    """Return the HTML page, which also contains the figures as JSON."""
    from jinja2 import Environment

    shown = analysis.presentation()
    template, style, drawing = (
        files(__package__).joinpath(name).read_text(encoding="utf-8")
        for name in ("report.html", "report.css", "picture.svg")
    )
    html = Environment(autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    sentence = headline(shown, setting)
    bars = [(value, name, text) for name, value, text in shown.bars if value > 0]
    best, lines = max(bars, default=None), wrap(sentence, 44)
    top = 100 + 50 * len(lines)
    drafts = ", ".join(map(_short, (setting.draft_model or "no draft").split(", ")))
    small_print = (
        f"{_short(setting.model)}, {drafts}, {setting.dtype}, temperature {setting.temperature:g}, "
        f"{analysis.texts} texts",
        f"{shown.unit}; mlx-specdec {setting.versions.get('mlx-specdec', '')}, {setting.date[:10]}",
    )
    picture = html.from_string(drawing).render(
        sentence=sentence,
        lines=lines,
        bars=[
            (shorten(bar[1], 24, placeholder=".."), bar[0] / best[0], bar[2], bar == best)
            for bar in bars
            if best is not None
        ],
        top=top,
        height=top + 58 * len(bars) + 100,
        small=[shorten(line, 100, placeholder=" ..") for line in small_print],
    )
    data = json.dumps(as_dict(analysis, setting), ensure_ascii=False, allow_nan=False)
    differences = [
        f"{method.name}, prompt {found.prompt + 1}, token {found.position}"
        + ("" if found.margin is None else f", margin {found.margin:.3g}")
        + (", a tie" if found.tie else "")
        for method in analysis.methods
        for found in method.differences
    ]
    return html.from_string(template).render(
        style=style,
        sentence=sentence,
        picture=b64encode(picture.encode()).decode() if bars else "",
        title=f"{_short(setting.model)}: {shown.title}",
        draft=f"draft {_short(setting.draft_model)}, " if setting.draft_model else "",
        setting=setting,
        warnings=_warnings(analysis, setting),
        analysis=analysis,
        shown=shown,
        differences=differences[:MOST_DIFFERENCES],
        more=len(differences) - MOST_DIFFERENCES,
        versions=", ".join(f"{name} {number}" for name, number in setting.versions.items()),
        # "</script>" in a model's name must not end the element.
        data=data.replace("<", "\\u003c"),
    )


def headline(shown: Presentation, setting: Setting) -> str:
    """Return a sentence with the speedup, the machine, and the number of equal outputs."""
    machine = setting.machine if setting.device == "cpu" else setting.device
    if shown.gain is None:
        first = shown.verdict.partition(";")[0].rstrip(".") or "Plain decoding was measured"
        return f"On {machine}: {first}."
    gain = f"rafts made {_short(setting.model)} {shown.gain:.2f} times as fast on {machine}"
    if setting.lossy or not shown.compared:
        return f"D{gain}."
    return f"D{gain}; {shown.same} of {shown.compared} texts are plain decoding's own."


def _warnings(analysis: Measured, setting: Setting) -> Iterator[str]:
    if analysis.interrupted:
        yield "Interrupted: these are the sequences measured until then."
    if setting.lossy:
        yield "Lossy settings: sequences may differ from the target's own."
    if analysis.skipped:
        first = next(iter(analysis.skipped.values()))
        yield f"{len(analysis.skipped)} prompts were skipped; the first: {first}"


def _short(name: str) -> str:
    return Path(name).name or name
